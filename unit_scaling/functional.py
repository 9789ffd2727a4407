"""Unit-scaled versions of `torch.nn.functional`: at initialisation, with standard normal inputs,
the output of every function and the gradient of every argument have RMS about 1.

Each function is a row of `unit_scaling.rules.table.OPS`. ``constraint`` names how its scales are
tied (see `unit_scaling.constraints`), ``mult`` is the op's u-muP hyper-parameter: how non-linear it
is.
"""

from .ops.activations import *
from .ops.arithmetic import *
from .ops.attention import *
from .ops.channel_norms import *
from .ops.contraction import *
from .ops.convolution import *
from .ops.dropouts import *
from .ops.embedding import *
from .ops.gated import *
from .ops.losses import *
from .ops.norms import *
from .ops.pooling import *
from .ops.products import *
from .ops.recurrent import *
from .ops.reductions import *
from .ops.regression import *
from .ops.residuals import *
from .ops.resizing import *
from .ops.unary import *

# Other names of the same.
mm = bmm = mv = matmul
baddbmm = addmm
swiglu = silu_glu

# Every name that is imported here without an underscore is public.
__all__ = sorted(name for name in dir() if not name.startswith("_"))
