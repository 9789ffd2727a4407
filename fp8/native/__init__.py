"""Products by FP8 kernels of the hardware, and the test that they compute what simulation does.
Imports `fp8.casts` and below.
"""
