"""Numbers: low-precision formats, casts, and matrix products computed from them."""

from .autocast import autocast, checkpoint_contexts
from .convert import convert, report, revert
from .formats import FORMATS, Format, get_format
from .history import AmaxHistory
from .low_precision import (
    NoEffectWarning,
    apply_low_precision_layernorm,
    low_precision_norms,
    norm_report,
    revert_norms,
)
from .norm import LayerNorm2d, is_fast_norm, set_fast_norm
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
    "LayerNorm2d",
    "NoEffectWarning",
    "Recipe",
    "ScaledTensor",
    "apply_low_precision_layernorm",
    "autocast",
    "checkpoint_contexts",
    "convert",
    "get_format",
    "get_recipe",
    "is_fast_norm",
    "low_precision_norms",
    "norm_report",
    "quantize",
    "quantize_backward",
    "quantize_forward",
    "report",
    "revert",
    "revert_norms",
    "scaled",
    "set_fast_norm",
    "stats",
]
