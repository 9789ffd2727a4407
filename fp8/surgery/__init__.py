"""What replaces or converts the layers of a model, and sets their scales.
Imports `fp8.modes` and below.
"""
