"""The arithmetic of one step of a tensor core's instruction.

Exponents are those of operands as stored: that of a product is the sum of two, whatever the
fractions multiply to, and a subnormal value has the exponent of the smallest normal one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...recipes.tensor_cores import Instruction

ABSENT = -(1 << 12)
"""The exponent of a zero operand: below all others, also after adding that of a value."""

_BITS = 13
"""The bits of a term below the largest exponent of the step, and of the fraction of a sum."""

_HIGH = 90
"""The largest exponent of a factor that makes terms whole numbers: above those of nonzero terms,
and low enough that no operand overflows beside a zero."""


class Part(NamedTuple):
    """What a step reads of an operand: values and exponents, (step, rows)."""

    values: Tensor
    exponents: Tensor


def _power(exponent: Tensor) -> Tensor:
    """2**exponent, for exponents of normal numbers."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def exponent_of(x: Tensor, low: int = -126) -> Tensor:
    """The exponent of float32 values, at least ``low``; ABSENT for zero."""
    field = (x.view(torch.int32) >> 23 & 0xFF) - 127
    return torch.where(x == 0, ABSENT, field.clamp_min(low))


def add_step(a: Part, b: Part, c: Tensor, how: Instruction) -> Tensor:
    """The sum so far, ``c``, and the products of a step."""
    top = exponent_of(c).clamp_min(how.of_zero)
    for k in range(how.step):
        top = torch.maximum(top, a.exponents[k][:, None] + b.exponents[k])
    unit = _power((_BITS - top).clamp(-126, _HIGH))
    # Each product is exact, as its fraction has at most 8 bits.
    terms = [(a.values[k][:, None] * unit * b.values[k]).int() for k in range(how.step)]
    total = torch.trunc(c * _power((_BITS - top).clamp_max(_HIGH)))
    total = (total + functools.reduce(torch.add, terms)) * _power((top - _BITS).clamp_min(-126))
    bits = total.view(torch.int32) >> 23 - _BITS << 23 - _BITS  # toward zero
    return bits.view(torch.float32) + 0.0  # -0 becomes 0
