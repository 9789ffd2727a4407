"""Levels O1, O2, O3: `fp8.initialize`, weights in FP8, and memory accounting.
Imports `fp8.surgery`, `fp8.optim` and below."""
