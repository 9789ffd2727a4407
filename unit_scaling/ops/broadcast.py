"""Functions of several operands, of which some may be broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..rules.table import Scales
from ..scale import scale_each, scale_output

__all__ = ["scaled_terms", "shares"]


def shares(*operands: Tensor) -> list[float]:
    """For each operand, 1/sqrt of the number of elements of the result that each of its elements
    contributes to: it sums their gradients.
    """
    size = math.prod(torch.broadcast_shapes(*[t.shape for t in operands])) or 1
    return [float(((t.numel() or 1) / size) ** 0.5) for t in operands]


def scaled_terms(fn: Callable[..., Tensor], operands: dict[str, Tensor], s: Scales) -> Tensor:
    """Returns ``fn(*operands)`` with the factors of ``s``, in a single pass per direction if those
    of the operands are equal.
    """
    factors = [s[name] for name in operands]
    if all(factor == factors[0] for factor in factors):
        return scale_output(fn(*operands.values()), s["output"], factors[0])
    terms = [scale_each(t, 1.0, s[name]) for name, t in operands.items()]
    return scale_each(fn(*terms), s["output"], 1.0)
