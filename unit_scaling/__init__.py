"""Unit scaling: scale factors for each operation such that every tensor has RMS about 1."""

from . import (
    analysis,
    constraints,
    core,
    formats,
    functional,
    modules,
    optim,
    parameter,
    scale,
    transforms,
    utils,
)
from .common.missing import explain_missing
from .core.functional import (
    completep_residual_scaling_rule,
    transformer_residual_scaling_rule,
)
from .layers.attention import *
from .layers.containers import *
from .layers.convolution import *
from .layers.embedding import *
from .layers.functions import *
from .layers.linear import *
from .layers.norms import *
from .layers.recurrent import *
from .layers.transformer import *
from .parameter import MupType, Parameter
from .rules.batch import batch_multiplier
from .rules.elementwise import unit_scaled
from .transforms import report, verify
from .version import __version__

explain_missing()

__all__ = [
    "MupType",
    "Parameter",
    "__version__",
    "analysis",
    "batch_multiplier",
    "completep_residual_scaling_rule",
    "constraints",
    "core",
    "formats",
    "functional",
    "modules",
    "optim",
    "parameter",
    "report",
    "scale",
    "transformer_residual_scaling_rule",
    "transforms",
    "unit_scaled",
    "utils",
    "verify",
    *(name for name in modules.__all__ if name != "MODULES"),
]
