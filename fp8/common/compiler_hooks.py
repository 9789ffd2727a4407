"""Torch functions that a mode intercepts in eager code but not under `torch.compile`.

The compiler dispatches only functions that torch lists as overridable to a mode. The functions
below are not listed, although hardswish and hardsigmoid check for overrides, and the others call an
overridable method or a C function. A compiled model would silently compute them without a recipe or
plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

__all__ = ["HIDDEN", "reveal"]

HIDDEN = (F.hardsigmoid, F.hardswish, F.sigmoid, F.tanh)


def reveal(*others: Callable[..., Any]) -> None:
    """Adds these functions, and ``others``, to torch's list, for the whole process."""
    listed = torch.overrides.get_overridable_functions()[F]
    listed += [function for function in (*HIDDEN, *others) if function not in listed]
    compiler = sys.modules.get("torch._dynamo.variables.torch")
    if compiler is not None:  # it may have cached the list
        compiler.get_overridable_functions.cache_clear()
