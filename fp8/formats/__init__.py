"""Low-precision formats, and rounding to them.
Imports `fp8.common`."""
