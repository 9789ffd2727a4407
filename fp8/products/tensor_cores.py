"""Sums of products as the tensor cores of accelerators compute them.

A tensor core adds a few products to its accumulator at once: it aligns them to the largest exponent
among them, truncates each a number of bits below that, adds what is left exactly, and rounds the
sum. The arithmetic was measured on the devices by others and is published with a model of every
instruction (arXiv:2511.10909, arXiv:2512.07004, package mmasim 2.1.1, the oracle of the tests).

Exponents are those of operands as stored: that of a product is the sum of two, whatever the
fractions multiply to, and a subnormal value has the exponent of the smallest normal one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TENSOR_CORES", "Instruction", "Matrix", "dot", "instruction"]

ABSENT = -(1 << 12)
"""The exponent of a zero operand: below all others, also after adding those of a value and of
scales."""


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


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """How a matrix instruction adds.

    Attributes:
        formats: those of its operands, in any combination.
        scales: the numbers of elements of a row that may share a block scale; () for instructions
            without block scales.
        scale_formats: those of block scales.
        step: the number of products that are added at once, in the order of k.
        add: (a, b, the sum so far, the instruction) -> the sum, all for one step.
        kept: bits below the largest exponent that a term keeps.
        fraction: bits of the sum's fraction.
        of_zero: the exponent of a zero product and of a zero sum.
    """

    formats: tuple[str, ...]
    scales: tuple[int, ...] = ()
    scale_formats: tuple[str, ...] = ()
    step: int
    add: Callable[[Matrix, Matrix, Tensor, Instruction], Tensor]
    kept: int
    fraction: int = 23
    of_zero: int = -133


# Arithmetic


def _power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2**exponent, for exponents of normal numbers."""
    if dtype == torch.float64:
        return ((exponent.long() + 1023) << 52).view(torch.float64)
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _exponent(x: Tensor, low: int = -126) -> Tensor:
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


def _aligned(a: Matrix, b: Matrix, c: Tensor, how: Instruction) -> Tensor:
    """NVIDIA's instructions: terms are truncated ``kept`` bits below the largest exponent."""
    ea, eb = _exponent(a.values, a.low), _exponent(b.values, b.low)
    products = a.values[..., :, None, :] * b.values[..., None, :, :]  # exact: at most 8 bits
    highest = (ea[..., :, None, :] + eb[..., None, :, :]).amax(-1)
    if a.scales is None or b.scales is None:
        shift: Tensor | int = 0
    else:  # powers of two
        of_a, of_b = (_exponent(x[..., 0], -127) for x in (a.scales, b.scales))
        shift = of_a[..., :, None] + of_b[..., None, :]
    top = torch.maximum(highest + shift, _exponent(c)).clamp_min(how.of_zero)
    wide = torch.float32 if how.fraction < 23 else torch.float64
    unit = _power((how.kept - top + shift).clamp(-126, 120), torch.float32)
    terms = torch.trunc(products * unit[..., None]).sum(-1, dtype=wide)
    high = 120 if wide == torch.float32 else 1000
    whole = torch.trunc(c.to(wide) * _power((how.kept - top).clamp_max(high), wide))
    low = -126 if wide == torch.float32 else -1000
    total = (terms + whole) * _power((top - how.kept).clamp_min(low), wide)
    return _toward_zero(total, how.fraction)


def _in_groups(a: Matrix, b: Matrix, c: Tensor, how: Instruction) -> Tensor:
    """NVIDIA's FP4 with block scales: the products of 16 elements are added exactly, multiplied by
    the fractions of their scales, and aligned by the exponents of the scales."""
    values_a, values_b = (x.values.unflatten(-1, (-1, _GROUP)) for x in (a, b))
    sums = torch.einsum("...mgk,...ngk->...mng", values_a, values_b)  # exact: multiples of 1/4
    nonzero = [(values != 0).float() for values in (values_a, values_b)]
    present = torch.einsum("...mgk,...ngk->...mng", *nonzero) > 0
    fractions, exponents = zip(*(_scale_parts(x, values_a.shape[-2]) for x in (a, b)), strict=True)
    fraction = fractions[0][..., :, None, :] * fractions[1][..., None, :, :]
    exponent = exponents[0][..., :, None, :] + exponents[1][..., None, :, :]
    exponent = torch.where(present & (fraction != 0), exponent, how.of_zero)
    top = torch.maximum(exponent.amax(-1), _exponent(c)).clamp_min(how.of_zero)
    wide = torch.float64
    unit = _power((how.kept + exponent - top[..., None]).clamp_min(-1000), wide)
    terms = torch.trunc(sums * fraction * unit).sum(-1)
    whole = torch.trunc(c.to(wide) * _power(how.kept - top, wide))
    return _toward_zero((terms + whole) * _power(top - how.kept, wide), how.fraction)


def _scale_parts(x: Matrix, groups: int) -> tuple[Tensor, Tensor]:
    """The fraction and the exponent of the scale of each group of a row: (..., rows, groups)."""
    assert x.scales is not None
    scales = x.scales.repeat_interleave(groups // x.scales.shape[-1], -1)
    exponent = _exponent(scales, x.scale_low)
    safe = exponent.clamp_min(-127)
    return scales.double() * _power(-safe, torch.float64), exponent


def _in_halves(a: Matrix, b: Matrix, c: Tensor, how: Instruction) -> Tensor:
    """AMD's CDNA3: products with even and odd index are aligned and added apart, then together,
    then to the sum; each shift rounds down, and the result to nearest even."""
    ea, eb = _exponent(a.values, a.low), _exponent(b.values, b.low)
    products = a.values[..., :, None, :] * b.values[..., None, :, :]
    exponents = (ea[..., :, None, :] + eb[..., None, :, :]).clamp_min(how.of_zero)
    wide = torch.float64
    halves = []
    for first in (0, 1):
        part, top = products[..., first::2], exponents[..., first::2].amax(-1)
        unit = _power((how.kept - top).clamp_max(120), torch.float32)
        halves.append((torch.trunc(part * unit[..., None]).sum(-1, dtype=wide), top))
    (even, top_even), (odd, top_odd) = halves
    top = torch.maximum(top_even, top_odd)
    dot = torch.floor(even * _power(top_even - top, wide))
    dot = dot + torch.floor(odd * _power(top_odd - top, wide))  # in units of 2**(top - kept)
    of_c = _exponent(c).clamp_min(-126)
    highest = torch.maximum(top, of_c)
    more = _CDNA3_SUM + 1 - how.kept
    dot = torch.floor(dot * _power(top - highest + more, wide)) * 2.0**-more
    own = torch.floor(c.to(wide) * _power(how.kept - highest, wide))
    own = torch.where(of_c < highest - how.kept - 1, 0.0, own)
    total = (dot + own) * _power(highest - how.kept, wide)
    field = ((total.view(torch.int64) >> 52 & 0x7FF) - 1023).clamp_min(-126)
    return (
        torch.floor(total * _power(_CDNA3_SUM - field, wide)) * _power(field - _CDNA3_SUM, wide)
    ).float()


_GROUP = 16
"""The products that `_in_groups` adds exactly."""
_CDNA3_SUM = 31
"""The bits of fraction of CDNA3's accumulator."""

_FP8 = ("e4m3", "e5m2")
_NARROW = (*_FP8, "e3m2", "e2m3", "e2m1")

TENSOR_CORES: dict[str, tuple[Instruction, ...]] = {
    "ada": (Instruction(formats=_FP8, step=16, add=_aligned, kept=13, fraction=13, of_zero=-132),),
    "hopper": (Instruction(formats=_FP8, step=32, add=_aligned, kept=13, fraction=13),),
    "blackwell": (
        Instruction(formats=_NARROW, step=32, add=_aligned, kept=25),
        Instruction(
            formats=("e2m1",),
            scales=(16, 32),
            scale_formats=("e8m0", "e4m3"),
            step=64,
            add=_in_groups,
            kept=35,
            of_zero=-139,
        ),
        Instruction(
            formats=_NARROW,
            scales=(32,),
            scale_formats=("e8m0",),
            step=32,
            add=_aligned,
            kept=25,
        ),
    ),
    "cdna3": (
        Instruction(
            formats=("e4m3fnuz", "e5m2fnuz"), step=16, add=_in_halves, kept=24, of_zero=-999
        ),
    ),
}
"""Accelerator -> its instructions for operands of eight bits and fewer: wgmma of Hopper, mma of
Ada, tcgen05.mma of Blackwell, mfma of CDNA3 (MI300)."""


def instruction(
    chip: str, formats: Sequence[str], along: int = 0, scale_format: str = ""
) -> Instruction | None:
    """The instruction of a chip for operands of these formats; None if it has none.

    along, scale_format: the block scales that the instruction applies; 0 for none.
    """
    for row in TENSOR_CORES[chip]:
        scaled = along in row.scales and scale_format in row.scale_formats
        if set(formats) <= set(row.formats) and (scaled if along else not row.scales):
            return row
    return None


# Products

TILE = 1 << 20
"""The number of products of a step that eager code holds in memory."""


def dot(a: Matrix, b: Matrix, how: Instruction) -> Tensor:
    """``a b^T`` as the instruction computes it, step by step in the order of k from a sum of zero.

    a: values (m, k). b: values (n, k). Returns (m, n), float32. k is padded with zeros to a
    multiple of the step. NaN and Inf follow IEEE arithmetic; a NaN has all bits of its fraction
    set and no sign.
    """
    finite_a, finite_b = _finite(a), _finite(b)
    c = torch.cat([_rows(rows, finite_b, how) for rows in _tiles(finite_a, finite_b, how)])
    odd = [(_marked(x).isfinite().logical_not().any(-1)) for x in (a, b)]
    odd_product = torch.matmul(_marked(a), _marked(b).mT)
    nan = torch.full((), 0x7FFFFFFF, dtype=torch.int32, device=c.device).view(torch.float32)
    odd_product = torch.where(odd_product.isnan(), nan, odd_product)
    return torch.where(odd[0][:, None] | odd[1], odd_product, c)


def _finite(x: Matrix) -> Matrix:
    """The operand with zeros for Inf and NaN, and a scale of 1 for NaN."""
    scales = None if x.scales is None else x.scales.nan_to_num(1.0)
    return x._replace(values=torch.where(x.values.isfinite(), x.values, 0.0), scales=scales)


def _marked(x: Matrix) -> Tensor:
    """The values, NaN where their scale is."""
    if x.scales is None:
        return x.values
    scales = x.scales.repeat_interleave(x.along, -1)[..., : x.values.shape[-1]]
    return torch.where(scales.isnan(), scales, x.values)


def _tiles(a: Matrix, b: Matrix, how: Instruction) -> Iterator[Matrix]:
    """The rows of ``a`` in parts whose products with all rows of b of a step fit into TILE."""
    rows = max(TILE // max(b.values.shape[0] * how.step, 1), 1)
    for start in range(0, a.values.shape[0], rows):
        part = slice(start, start + rows)
        yield a._replace(values=a.values[part], scales=None if a.scales is None else a.scales[part])


def _rows(a: Matrix, b: Matrix, how: Instruction) -> Tensor:
    c = a.values.new_zeros(a.values.shape[0], b.values.shape[0])
    for start in range(0, a.values.shape[1], how.step):
        c = how.add(_step(a, start, how.step), _step(b, start, how.step), c, how)
    return c


def _step(x: Matrix, start: int, step: int) -> Matrix:
    """The part of an operand that a step reads."""
    values = x.values[:, start : start + step]
    missing = step - values.shape[1]
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    if x.scales is None:
        return x._replace(values=values)
    scales = x.scales[:, start // x.along : -(-(start + step) // x.along)]
    return x._replace(values=values, scales=scales)
