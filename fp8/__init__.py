"""Numbers: low-precision formats, casts, and matrix products computed from them."""
