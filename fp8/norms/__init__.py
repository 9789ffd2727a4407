"""Norms in low precision.
Imports `fp8.casts` and below."""
