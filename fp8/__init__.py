"""Low-precision formats, casts, recipes, and matrix products computed with them.

The names of the core are imported with the package; the names of training and of the lab, `LATE`,
when they are first read.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import warnings
from .casts.scaled_tensor import ScaledTensor, scaled
from .formats.format import FORMATS, Format
from .formats.quantize import quantize
from .modes.autocast import autocast, checkpoint_contexts
from .recipes.cast import Cast
from .recipes.history import reduce_amax
from .recipes.recipe import RECIPES, Recipe
from .recipes.rules import Rule
from .version import __version__
from .warnings import PitfallWarning, strict

__all__ = [
    "FORMATS",
    "LEVELS",
    "RECIPES",
    "Cast",
    "Format",
    "LayerNorm2d",
    "PitfallWarning",
    "Policy",
    "Recipe",
    "Rule",
    "ScaledTensor",
    "__version__",
    "advance",
    "apply_low_precision_layernorm",
    "autocast",
    "blame",
    "cached_weights",
    "calibrate",
    "calibration",
    "checkpoint_contexts",
    "convert",
    "eject",
    "export",
    "forecast",
    "initialize",
    "load",
    "optim",
    "override",
    "parity",
    "preflight",
    "quantize",
    "record",
    "reduce_amax",
    "report",
    "revert",
    "scaled",
    "stats",
    "store_frozen",
    "strict",
    "warnings",
    "weights",
]

LATE = {
    "LEVELS": "fp8.training.levels",
    "LayerNorm2d": "fp8.training.layer_norm2d",
    "Policy": "fp8.recipes.policy",
    "advance": "fp8.layers.convert",
    "apply_low_precision_layernorm": "fp8.training.low_precision_norms",
    "blame": "fp8.lab.blame",
    "cached_weights": "fp8.layers.cached_weights",
    "calibrate": "fp8.layers.calibrate",
    "calibration": "fp8.layers.calibrate",
    "convert": "fp8.layers.convert",
    "eject": "fp8.layers.eject",
    "export": "fp8.checkpoints.weights",
    "forecast": "fp8.lab.forecast.forecast",
    "initialize": "fp8.training.levels",
    "load": "fp8.checkpoints.load",
    "optim": "fp8.optim",
    "override": "fp8.layers.override",
    "parity": "fp8.lab.parity.parity",
    "preflight": "fp8.lab.preflight.preflight",
    "record": "fp8.lab.record.recorder",
    "report": "fp8.layers.report",
    "revert": "fp8.layers.convert",
    "stats": "fp8.lab.stats",
    "store_frozen": "fp8.training.stored_weights",
    "weights": "fp8.checkpoints.weights",
}
"""Name -> the module that defines it, imported when the name is first read."""

if TYPE_CHECKING:
    from . import optim
    from .checkpoints.load import load
    from .checkpoints.weights import export, weights
    from .lab.blame import blame
    from .lab.forecast.forecast import forecast
    from .lab.parity.parity import parity
    from .lab.preflight.preflight import preflight
    from .lab.record.recorder import record
    from .lab.stats import stats
    from .layers.cached_weights import cached_weights
    from .layers.calibrate import calibrate, calibration
    from .layers.convert import advance, convert, revert
    from .layers.eject import eject
    from .layers.override import override
    from .layers.report import report
    from .recipes.policy import Policy
    from .training.layer_norm2d import LayerNorm2d
    from .training.levels import LEVELS, initialize
    from .training.low_precision_norms import apply_low_precision_layernorm
    from .training.stored_weights import store_frozen
else:

    def __getattr__(name):
        if name not in LATE:
            raise AttributeError(f"module 'fp8' has no attribute {name!r}")
        module = import_module(LATE[name])
        value = module if LATE[name] == f"fp8.{name}" else getattr(module, name)
        return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
