"""Matrix products, convolutions and attention under a recipe, forward and backward.
Imports `fp8.kernels` and below."""
