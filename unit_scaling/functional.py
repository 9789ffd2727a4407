"""Unit-scaled versions of `torch.nn.functional`.

At initialisation, with standard normal inputs, the output of every function and the gradient of
every argument have RMS about 1. Each function is a row of `unit_scaling.rules.table.OPS`.
``constraint`` names a constraint on its scales (see `unit_scaling.constraints`); ``mult`` is the
op's u-muP hyperparameter, which controls its non-linearity.
"""

from .ops.activations import *
from .ops.arithmetic import *
from .ops.attention import *
from .ops.convolution import *
from .ops.dropouts import *
from .ops.embedding import *
from .ops.losses import *
from .ops.norms import *
from .ops.pooling import *
from .ops.products import *
from .ops.recurrent import *
from .rules.table import OPS

# Aliases.
mm = bmm = mv = matmul
baddbmm = addmm
swiglu = silu_glu

_OTHERS = "baddbmm bmm mm mv residual_add residual_apply residual_split swiglu"

__all__ = sorted([*OPS, *_OTHERS.split()])

# The files of ops import other names, and torch.fx wraps all that it finds in a module.
for _name in {name for name in globals() if not name.startswith("_")}.difference(
    __all__
):
    del globals()[_name]
