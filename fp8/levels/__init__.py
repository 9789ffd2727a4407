"""O1, O2, O3: `fp8.initialize`, weights in FP8, and the memory that a level takes.
Imports `fp8.surgery`, `fp8.optim` and below.
"""
