"""Products of matrices that sum as an instruction of a tensor core does, tile by tile.

An operand has the exponent with which it is stored: the exponent of a product is the sum of two,
whatever the fractions multiply to, and a subnormal value has the exponent of the smallest normal
one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...recipes.tensor_cores import Instruction

# The exponent of a zero operand: below all others, also after the exponent of a value is added.
ABSENT = -(1 << 12)

# The bits of a term below the largest exponent of the step, and of the fraction of a sum.
_BITS = 13

# The largest exponent of a factor that makes terms whole numbers: above the exponents of nonzero
# terms, and low enough that no operand overflows beside a zero.
_HIGH = 90


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


def add_step(
    a: Part,
    b: Part,
    c: Tensor,
    how: Instruction,
) -> Tensor:
    """The sum so far, ``c``, and the products of a step."""
    top = exponent_of(c).clamp_min(how.of_zero)
    for k in range(how.step):
        top = torch.maximum(top, a.exponents[k][:, None] + b.exponents[k])
    shift = _BITS - top
    unit = _power(shift.clamp(-126, _HIGH))
    terms = []
    for k in range(how.step):
        # Each product is exact, as its fraction has at most 8 bits.
        term = a.values[k][:, None] * unit * b.values[k]
        terms.append(term.int())
    total = torch.trunc(c * _power(shift.clamp_max(_HIGH)))
    total = total + reduce(torch.add, terms)
    total = total * _power((top - _BITS).clamp_min(-126))
    bits = total.view(torch.int32) >> 23 - _BITS << 23 - _BITS  # toward zero
    return bits.view(torch.float32) + 0.0  # -0 becomes 0


# The rows and columns of the sums that are computed together, so that they stay in the cache.
TILE = (128, 256)

# The number of products that are summed in eager mode before the arithmetic is compiled, which
# takes about 10 seconds and makes it about ten times faster.
EAGER = 1 << 29


def dot(
    a: Tensor,
    b: Tensor,
    lows: tuple[int, int],
    how: Instruction,
) -> Tensor:
    """``a b^T`` as the instruction computes it, step by step in the order of k from a sum of zero.

    a: (m, k), float32, of a format. b: (n, k). lows: the smallest exponents of their formats.
    Returns (m, n), float32. k is padded with zeros to a multiple of the step. NaN and Inf follow
    IEEE arithmetic; a NaN has all bits of its fraction set and no sign.
    """
    c = _sums(a, b, lows, how)
    odd_a = ~a.isfinite().all(-1)
    odd_b = ~b.isfinite().all(-1)
    if not (odd_a.any() or odd_b.any()):
        return c
    product = torch.matmul(a, b.mT)
    # NaN is written as bits, since torch makes a NaN of other bits.
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=c.device)
    product = torch.where(product.isnan(), nan.view(torch.float32), product)
    return torch.where(odd_a[:, None] | odd_b, product, c)


def _sums(
    a: Tensor,
    b: Tensor,
    lows: tuple[int, int],
    how: Instruction,
) -> Tensor:
    """`dot` with zeros for Inf and NaN, tile by tile."""
    (m, k), n = a.shape, b.shape[0]
    products = m * n * k
    add: Add = add_step
    # Compiled functions take whole tiles only, so that one graph serves all.
    whole = a.is_cpu and _DONE[how] + products >= EAGER
    if whole:
        add = _compiled(add_step)
    else:
        _DONE[how] += products
    tiles = _tiles(b, TILE[1], whole)
    right = [_parts(tile, lows[1], how.step) for tile in tiles]
    bands = []
    for tile in _tiles(a, TILE[0], whole):
        left = _parts(tile, lows[0], how.step)
        sums = []
        for parts in right:
            rows = left[0].values.shape[1]
            columns = parts[0].values.shape[1]
            c = a.new_zeros(rows, columns)
            for first, second in zip(left, parts, strict=True):
                c = add(first, second, c, how)
            sums.append(c)
        bands.append(torch.cat(sums, 1))
    return torch.cat(bands)[:m, :n]


def _tiles(
    x: Tensor,
    rows: int,
    whole: bool,
) -> Iterator[Tensor]:
    """``x`` in parts of so many rows; the last is padded with zeros if ``whole``."""
    for part in x.split(rows):
        if whole:
            part = F.pad(part, (0, 0, 0, rows - part.shape[0]))
        yield part


def _parts(
    x: Tensor,
    low: int,
    step: int,
) -> list[Part]:
    values = torch.where(x.isfinite(), x, 0.0).mT
    missing = -values.shape[0] % step
    values = F.pad(values, (0, 0, 0, missing)).contiguous()
    exponents = exponent_of(values, low)
    pairs = zip(values.split(step), exponents.split(step), strict=True)
    return [Part(*pair) for pair in pairs]


# Instruction -> the number of products that were summed in eager mode.
_DONE: Counter[Instruction] = Counter()

Add = Callable[[Part, Part, Tensor, Instruction], Tensor]


@cache
def _compiled(add: Add) -> Add:
    used = torch.compile(add, dynamic=False)

    def call(
        a: Part,
        b: Part,
        c: Tensor,
        how: Instruction,
    ) -> Tensor:
        nonlocal used
        try:
            return used(a, b, c, how)
        except RuntimeError as error:  # no compiler
            if used is add:
                raise
            used = add
            warnings.warn(_SLOW.format(error), RuntimeWarning, stacklevel=2)
        return add(a, b, c, how)

    return call


_SLOW = (
    "the sums of a tensor core could not be compiled ({!s:.200}): they run in eager mode, about "
    "ten times slower"
)
