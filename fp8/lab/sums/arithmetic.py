"""The arithmetic of one step of a tensor core's instruction: `ADDITIONS`.

Exponents are those of operands as stored: that of a product is the sum of two, whatever the
fractions multiply to, and a subnormal value has the exponent of the smallest normal one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...recipes.tensor_cores import Instruction

ABSENT = -(1 << 12)
"""The exponent of a zero operand: below all others, also after adding those of a value and of
scales."""


_HIGH = 90
"""The largest exponent of a factor that makes terms whole numbers: above those of nonzero terms,
term_bits + 30, and low enough that no operand overflows beside a zero."""


class Matrix(NamedTuple):
    """An operand of an instruction.

    values: (..., rows, k), float32, of a format. scales: (..., rows or 1, k / along), float32, one
    for ``along`` elements of a row; None without block scales. low, scale_low: the smallest
    exponents of the formats.
    """

    values: Tensor
    low: int
    scales: Tensor | None = None
    along: int = 0
    scale_low: int = -127


class Part(NamedTuple):
    """What a step reads of a `Matrix`, transposed. values, exponents: (step, rows)."""

    values: Tensor
    exponents: Tensor
    scale: Tensor | None
    scale_low: int


def _power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2**exponent, for exponents of normal numbers."""
    if dtype == torch.float64:
        return ((exponent.long() + 1023) << 52).view(torch.float64)
    return ((exponent.int() + 127) << 23).view(torch.float32)


def exponent_of(x: Tensor, low: int = -126) -> Tensor:
    """The exponent of float32 values, at least ``low``; ABSENT for zero."""
    field = (x.view(torch.int32) >> 23 & 0xFF) - 127
    return torch.where(x == 0, ABSENT, field.clamp_min(low))


def _toward_zero(x: Tensor, fraction: int) -> Tensor:
    """``x`` as float32 with ``fraction`` bits of fraction, rounded toward zero."""
    y = x.float()
    bits = y.view(torch.int32)
    if x.dtype == torch.float64:  # rounded to nearest: one step back where that went outward
        outward = (y.double().abs() > x.abs()) & (x.abs() < 2.0**128)
        bits = bits - outward.int()
    return (bits >> 23 - fraction << 23 - fraction).view(torch.float32) + 0.0  # -0 becomes 0


def _aligned(a: Part, b: Part, c: Tensor, how: Instruction) -> Tensor:
    """NVIDIA's instructions: terms are truncated ``term_bits`` bits below the largest exponent."""
    shift: Tensor | int = 0
    if a.scale is not None and b.scale is not None:  # powers of two
        shift = exponent_of(a.scale[:, :1], a.scale_low) + exponent_of(b.scale[:, 0], b.scale_low)
    top = torch.maximum(_highest(a, b, range(how.step)) + shift, exponent_of(c))
    top = top.clamp_min(how.of_zero)
    wide = torch.float32 if how.fraction < 23 else torch.float64
    unit = _power((how.term_bits - top + shift).clamp(-126, _HIGH), torch.float32)
    high, low = (_HIGH, -126) if wide == torch.float32 else (1000, -1000)
    total = torch.trunc(c.to(wide) * _power((how.term_bits - top).clamp_max(high), wide))
    for start in range(0, how.step, _EXACT):
        total = total + _truncated(a, b, unit, range(start, start + _EXACT)).to(wide)
    return _toward_zero(total * _power((top - how.term_bits).clamp_min(low), wide), how.fraction)


def _highest(a: Part, b: Part, which: range) -> Tensor:
    top = a.exponents[which[0]][:, None] + b.exponents[which[0]]
    for k in which[1:]:
        top = torch.maximum(top, a.exponents[k][:, None] + b.exponents[k])
    return top


_EXACT = 16
"""The terms whose sum int32 holds: of at most 3.6 * 2**25, 25 the most bits that a term keeps."""


def _truncated(a: Part, b: Part, unit: Tensor, which: range) -> Tensor:
    """The sum of some products of a step, each multiplied by ``unit`` and truncated, int32. Each
    product is exact, as its fraction has at most 8 bits."""
    terms = [(a.values[k][:, None] * unit * b.values[k]).int() for k in which]
    return functools.reduce(torch.add, terms)


def _in_groups(a: Part, b: Part, c: Tensor, how: Instruction) -> Tensor:
    """NVIDIA's FP4 with block scales: the products of 16 elements are added exactly, multiplied by
    the fractions of their scales, and aligned by the exponents of the scales."""
    wide, top = torch.float64, exponent_of(c).clamp_min(how.of_zero)
    groups = []
    (of_a, power_a), (of_b, power_b) = (_scale_parts(x, how.step // _GROUP) for x in (a, b))
    for g in range(how.step // _GROUP):
        rows = slice(g * _GROUP, (g + 1) * _GROUP)
        left, right = a.values[rows], b.values[rows]
        total = torch.mm(left.mT, right)  # exact: multiples of 1/4 up to 576
        present = torch.mm((left != 0).float().mT, (right != 0).float()) > 0
        fraction = of_a[:, g, None] * of_b[:, g]
        exponent = power_a[:, g, None] + power_b[:, g]
        exponent = torch.where(present & (fraction != 0), exponent, how.of_zero)
        top = torch.maximum(top, exponent)
        groups.append((total * fraction, exponent))
    total = torch.trunc(c.to(wide) * _power(how.term_bits - top, wide))
    for term, exponent in groups:
        unit = _power((how.term_bits + exponent - top).clamp_min(-1000), wide)
        total = total + torch.trunc(term * unit)
    return _toward_zero(total * _power(top - how.term_bits, wide), how.fraction)


def _scale_parts(x: Part, groups: int) -> tuple[Tensor, Tensor]:
    """The fraction and the exponent of the scale of each group of a row: (rows, groups)."""
    assert x.scale is not None
    scales = x.scale.repeat_interleave(groups // x.scale.shape[-1], -1)
    exponent = exponent_of(scales, x.scale_low)
    fraction = scales.double() * _power(-exponent.clamp_min(x.scale_low), torch.float64)
    return fraction, exponent


_GROUP = 16
"""The products that `_in_groups` adds exactly."""

ADDITIONS: dict[str, Callable[[Part, Part, Tensor, Instruction], Tensor]] = {
    "aligned": _aligned,
    "in_groups": _in_groups,
}
"""`Instruction.add` -> (a, b, the sum so far, the instruction) -> the sum, all for one step."""
