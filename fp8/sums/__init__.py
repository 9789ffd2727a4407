"""Sums of products as the tensor cores of accelerators compute them: `Recipe.accumulate`.
Imports `fp8.common`."""
