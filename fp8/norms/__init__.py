"""Norms in low precision.
Imports `fp8.products` and below."""
