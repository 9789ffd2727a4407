"""Unit-scaled versions of the modules of `torch.nn`, and a transformer made of them.

Each subclasses the torch module of the same name, if there is one: `isinstance`, `state_dict` keys
and `repr` are torch's. Weights are initialised to RMS 1, biases to zero. `MODULES` maps torch
modules to unit-scaled ones.
"""

from torch import nn as _nn

from .layers.attention import *
from .layers.containers import *
from .layers.convolution import *
from .layers.embedding import *
from .layers.functions import *
from .layers.linear import *
from .layers.norms import *
from .layers.recurrent import *
from .layers.transformer import *

#: torch.nn module -> its unit-scaled version, with the same order of arguments.
MODULES: dict[type[_nn.Module], type[_nn.Module]] = {
    getattr(_nn, _name): _unit
    for _name, _unit in {**globals()}.items()
    if hasattr(_nn, _name)
    and isinstance(_unit, type)
    and issubclass(_unit, getattr(_nn, _name))
}

# All imported names without a leading underscore are public.
__all__ = sorted(name for name in dir() if not name.startswith("_"))
