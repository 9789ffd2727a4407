"""Functions of torch that a mode sees in eager code, and that the compiler hides from it.

The compiler asks a mode about the functions alone that torch lists as overridable. Those below are
no part of that list (hardswish and hardsigmoid ask for overrides all the same; the others call a
method that is one), so that a compiled model would compute them without its plan, and not say so.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F

__all__ = ["HIDDEN", "reveal"]

HIDDEN = (F.hardsigmoid, F.hardswish, F.sigmoid, F.tanh)


def reveal() -> None:
    """Adds them to torch's list, for all of the process."""
    listed = torch.overrides.get_overridable_functions()[F]
    listed += [function for function in HIDDEN if function not in listed]
    compiler = sys.modules.get("torch._dynamo.variables.torch")
    if compiler is not None:  # it may have read the list before
        compiler.get_overridable_functions.cache_clear()
