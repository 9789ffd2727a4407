"""Numbers: low-precision formats, casts, and matrix products computed from them."""

from .autocast import autocast, checkpoint_contexts
from .convert import convert, report, revert
from .formats import FORMATS, Format, get_format
from .history import AmaxHistory
from .quantize import quantize, quantize_backward, quantize_forward
from .recipe import RECIPES, Cast, Recipe, get_recipe
from .scaled_tensor import ScaledTensor, scaled
from .stats import stats

__all__ = [
    "FORMATS",
    "RECIPES",
    "AmaxHistory",
    "Cast",
    "Format",
    "Recipe",
    "ScaledTensor",
    "autocast",
    "checkpoint_contexts",
    "convert",
    "get_format",
    "get_recipe",
    "quantize",
    "quantize_backward",
    "quantize_forward",
    "report",
    "revert",
    "scaled",
    "stats",
]
