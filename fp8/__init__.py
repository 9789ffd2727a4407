"""Low-precision formats, casts, recipes, and matrix products computed with them."""

from typing import TYPE_CHECKING

from . import optim
from .checkpoints.weights import export, weights
from .common.pitfalls import (
    CheckpointWarning,
    ConvertWarning,
    OptimizerWarning,
    PitfallWarning,
    RecipeWarning,
    ScaleWarning,
    strict,
)
from .common.removed import attributes_of
from .formats.format import FORMATS, Format, get_format
from .formats.quantize import quantize, quantize_backward, quantize_forward
from .levels.initialize import LEVELS, Level, initialize
from .levels.weights import store_frozen
from .modes.autocast import autocast, checkpoint_contexts
from .norms.low_precision import (
    NoEffectWarning,
    apply_low_precision_layernorm,
    low_precision_norms,
    norm_report,
    revert_norms,
)
from .norms.norm import LayerNorm2d, is_fast_norm, set_fast_norm
from .recipes.cast import Cast
from .recipes.history import AmaxHistory, reduce_amax
from .recipes.policy import Policy, Rule
from .recipes.recipe import RECIPES, Recipe, get_recipe
from .studies.preflight import Preflight, PreflightError, preflight
from .studies.stats import dump, stats
from .surgery.calibrate import calibrate, calibration
from .surgery.convert import advance, convert, report, revert
from .surgery.override import override
from .tensors.scaled_tensor import ScaledTensor, scaled
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
    "Policy",
    "Preflight",
    "PreflightError",
    "Recipe",
    "RecipeWarning",
    "Rule",
    "ScaleWarning",
    "ScaledTensor",
    "__version__",
    "advance",
    "apply_low_precision_layernorm",
    "autocast",
    "calibrate",
    "calibration",
    "checkpoint_contexts",
    "convert",
    "dump",
    "export",
    "get_format",
    "get_recipe",
    "initialize",
    "is_fast_norm",
    "low_precision_norms",
    "norm_report",
    "optim",
    "override",
    "preflight",
    "quantize",
    "quantize_backward",
    "quantize_forward",
    "reduce_amax",
    "report",
    "revert",
    "revert_norms",
    "scaled",
    "set_fast_norm",
    "stats",
    "store_frozen",
    "strict",
    "weights",
]

if not TYPE_CHECKING:
    __getattr__ = attributes_of("fp8")
