"""Unit-scaled versions of the modules of `torch.nn`, and a transformer made of them.

Each is a subclass of the module of the same name in torch, where there is one: `isinstance`,
`state_dict` keys and `repr` are torch's. Weights start at RMS 1, biases at zero. `MODULES` maps
one to the other.
"""

from torch import nn as _nn

from .common.argument_errors import named_in_errors as _named_in_errors
from .layers.activations import *
from .layers.attention import *
from .layers.containers import *
from .layers.convolution import *
from .layers.embedding import *
from .layers.layers import *
from .layers.linear import *
from .layers.losses import *
from .layers.norms import *
from .layers.pooling import *
from .layers.recurrent import *
from .layers.regularizers import *
from .layers.transformer import *

_CLASSES = {name: value for name, value in globals().items() if isinstance(value, type)}

#: Module of torch.nn -> its unit-scaled version, which takes its arguments in the same order.
MODULES: dict[type[_nn.Module], type[_nn.Module]] = {
    _base: unit
    for name, unit in _CLASSES.items()
    if (_base := getattr(_nn, name, None)) and issubclass(unit, _base)
}

for _class in _CLASSES.values():
    _named_in_errors(_class)

# Every name that is imported here without an underscore is public.
__all__ = sorted(name for name in dir() if not name.startswith("_"))
