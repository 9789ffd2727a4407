"""Levels O1, O2, O3: `fp8.initialize`, and weights in FP8.
Imports `fp8.surgery`, `fp8.optim` and below."""
