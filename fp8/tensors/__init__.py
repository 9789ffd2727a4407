"""Tensors stored as FP8 values with a scale.
Imports `fp8.recipes` and below."""
