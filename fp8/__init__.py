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
from .formats.format import FORMATS, Format
from .formats.quantize import quantize
from .levels.initialize import LEVELS, Level, initialize
from .levels.weights import store_frozen
from .modes.autocast import autocast, checkpoint_contexts
from .norms.low_precision import apply_low_precision_layernorm
from .norms.norm import LayerNorm2d
from .recipes.cast import Cast
from .recipes.history import reduce_amax
from .recipes.policy import Policy, Rule
from .recipes.recipe import RECIPES, Recipe
from .studies.preflight import preflight
from .studies.stats import stats
from .surgery.calibrate import calibrate, calibration
from .surgery.convert import advance, convert, report, revert
from .surgery.override import override
from .tensors.scaled_tensor import ScaledTensor, scaled
from .version import __version__

__all__ = [
    "FORMATS",
    "LEVELS",
    "RECIPES",
    "Cast",
    "CheckpointWarning",
    "ConvertWarning",
    "Format",
    "LayerNorm2d",
    "Level",
    "OptimizerWarning",
    "PitfallWarning",
    "Policy",
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
    "export",
    "initialize",
    "optim",
    "override",
    "preflight",
    "quantize",
    "reduce_amax",
    "report",
    "revert",
    "scaled",
    "stats",
    "store_frozen",
    "strict",
    "weights",
]

if not TYPE_CHECKING:
    __getattr__ = attributes_of("fp8")
