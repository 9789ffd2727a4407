"""Low-precision formats and how numbers are rounded to them.
Imports `fp8.common`.
"""
