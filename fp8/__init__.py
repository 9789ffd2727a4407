"""Numbers: low-precision formats, casts, and matrix products computed from them."""

from . import optim
from .autocast import autocast, checkpoint_contexts
from .calibrate import calibrate, calibration
from .convert import convert, report, revert
from .export import export
from .formats import FORMATS, Format, get_format
from .frozen import store_frozen
from .history import AmaxHistory, reduce_amax
from .level_state import state
from .levels import LEVELS, Level, initialize
from .low_precision import (
    NoEffectWarning,
    apply_low_precision_layernorm,
    low_precision_norms,
    norm_report,
    revert_norms,
)
from .norm import LayerNorm2d, is_fast_norm, set_fast_norm
from .pitfalls import (
    CheckpointWarning,
    ConvertWarning,
    OptimizerWarning,
    PitfallWarning,
    RecipeWarning,
    ScaleWarning,
    strict,
)
from .quantize import quantize, quantize_backward, quantize_forward
from .recipe import RECIPES, Cast, Recipe, get_recipe
from .scaled_tensor import ScaledTensor, scaled
from .scaled_weights import export_weights
from .stats import stats
from .version import __version__

__all__ = [
    "FORMATS",
    "LEVELS",
    "RECIPES",
    "AmaxHistory",
    "Cast",
    "CheckpointWarning",
    "ConvertWarning",
    "Format",
    "LayerNorm2d",
    "Level",
    "NoEffectWarning",
    "OptimizerWarning",
    "PitfallWarning",
    "Recipe",
    "RecipeWarning",
    "ScaleWarning",
    "ScaledTensor",
    "__version__",
    "apply_low_precision_layernorm",
    "autocast",
    "calibrate",
    "calibration",
    "checkpoint_contexts",
    "convert",
    "export",
    "export_weights",
    "get_format",
    "get_recipe",
    "initialize",
    "is_fast_norm",
    "low_precision_norms",
    "norm_report",
    "optim",
    "quantize",
    "quantize_backward",
    "quantize_forward",
    "reduce_amax",
    "report",
    "revert",
    "revert_norms",
    "scaled",
    "set_fast_norm",
    "state",
    "stats",
    "store_frozen",
    "strict",
]
