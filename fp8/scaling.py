"""Where the scale of an operand comes from.

A scale is the value of one unit of the format: the operand stored is ``x / scale``. Powers of two
make that division exact.
"""

from __future__ import annotations

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
    Returns a 0-dim float32 tensor. It is 1 where the amax is zero or not finite, so an Inf or a
    NaN reaches the cast unscaled; it is clamped to the normal float32 range.
    """
    if x.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=x.device)
    amax = torch.ops.aten.amax.default(x.detach().abs()).float()
    mantissa, exponent = torch.frexp(amax / format.max)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(amax))


SCALINGS: dict[str, Callable[[Tensor, Format], Tensor | None]] = {
    "unit": unit_scale,
    "tensor": tensor_scale,
}
"""Name of a scaling -> function of (operand, format) giving its scale, or None for scale one."""
