"""Where the scale of an operand comes from.

A scale is the value of one unit of the format: the operand stored is ``x / scale``. Powers of two
make that division exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .formats import Format

__all__ = ["SCALINGS", "tensor_scale", "unit_scale"]


def unit_scale(x: Tensor, format: Format) -> None:
    """No scale at all: the operand is expected to have RMS about 1 (Unit Scaling, section 3)."""
    return


def tensor_scale(x: Tensor, format: Format) -> Tensor:
    """The smallest power of two under which no finite element of ``x`` overflows ``format``.

    "Current" per-tensor scaling: one pass over ``x`` for its largest magnitude, no history.
    Returns a 0-dim float32 tensor (float64 for float64). It is 1 where the largest magnitude is
    zero, Inf or NaN, so that these reach the cast unscaled, and for an empty tensor. It is not
    less than 2**-126, the smallest normal float32: a tensor below that times half the format's
    smallest value becomes zero; and not more than 2**127, past which only float64 reaches.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    one = torch.ones((), dtype=dtype, device=x.device)
    if x.numel() == 0:
        return one
    low, high = torch.ops.aten.aminmax.default(x.detach())
    amax = torch.maximum(-low, high).to(dtype)
    # amax = m * 2**e and max = M * 2**E with m and M in [1/2, 1), so amax <= max * 2**(e - E)
    # if and only if m <= M.
    mantissa, exponent = torch.frexp(amax)
    top, top_exponent = math.frexp(format.max)
    exponent = exponent - top_exponent + (mantissa > top)
    scale = torch.ldexp(one, exponent.clamp(-126, 127))
    return torch.where((amax > 0) & torch.isfinite(amax), scale, one)


SCALINGS: dict[str, Callable[[Tensor, Format], Tensor | None]] = {
    "unit": unit_scale,
    "tensor": tensor_scale,
}
"""Name of a scaling -> function of (operand, format) giving its scale, or None for scale one."""
