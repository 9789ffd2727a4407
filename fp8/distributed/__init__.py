"""Several processes: gradients reduced in FP8, weights gathered in FP8.
Imports `fp8.surgery`, `fp8.optim` and below.
"""
