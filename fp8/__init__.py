"""Numbers: low-precision formats, casts, and matrix products computed from them."""

from fp8.formats import FORMATS, Format, get_format
from fp8.quantize import quantize, quantize_backward, quantize_forward

__all__ = [
    "FORMATS",
    "Format",
    "get_format",
    "quantize",
    "quantize_backward",
    "quantize_forward",
]
