"""Converts or replaces the layers of a model, and calibrates their scales.
Imports `fp8.modes` and below."""
