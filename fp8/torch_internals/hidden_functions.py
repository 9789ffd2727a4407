"""Functions that torch.compile hides from torch-function modes, or cannot trace in one.

Works around: torch.compile (2.11 to 2.14) calls a mode for the functions alone that
`torch.overrides.get_overridable_functions` lists, a list that lacks some, and cannot trace
`Tensor.unflatten` inside a mode.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import Arguments, Keywords, TorchFunction
from .decorators import taken_as_constant

#: Functions that torch does not list as overridable: torch.compile hides them from modes, and a
#: compiled model would silently compute them without a recipe or replacement.
HIDDEN: list[TorchFunction] = [F.hardsigmoid, F.hardswish, F.sigmoid, F.tanh]


@taken_as_constant
def reveal() -> bool:
    """Moves `HIDDEN` to torch's list, for the whole process; torch has no public way to extend it.
    The tracer executes it, because it is a constant."""
    if HIDDEN:
        torch.overrides.get_overridable_functions()[F].extend(HIDDEN)
        HIDDEN.clear()
        compiler = sys.modules.get("torch._dynamo.variables.torch")
        if compiler is not None:  # which has cached the list
            compiler.get_overridable_functions.cache_clear()
    return True


def called(function: TorchFunction, args: Arguments, kwargs: Keywords) -> Any:
    """``function(*args, **kwargs)`` inside a torch-function mode, where torch.compile cannot trace
    `Tensor.unflatten`."""
    if function is Tensor.unflatten:
        return torch.unflatten(*args, **kwargs)
    return function(*args, **kwargs)
