"""Products of matrices whose sums are those of an instruction, tile by tile."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...recipes.tensor_cores import Instruction
from .arithmetic import ADDITIONS, Matrix, Part, exponent_of

TILE = (128, 256)
"""The rows and columns of the sums that are computed together, so that they stay in the cache."""

EAGER = 1 << 29
"""The number of products that are summed in eager mode before the arithmetic is compiled, which
takes about 10 seconds and makes it about ten times faster."""


def dot(a: Matrix, b: Matrix, how: Instruction) -> Tensor:
    """``a b^T`` as the instruction computes it, step by step in the order of k from a sum of zero.

    a: values (m, k). b: values (n, k). Returns (m, n), float32. k is padded with zeros to a
    multiple of the step. NaN and Inf follow IEEE arithmetic; a NaN has all bits of its fraction
    set and no sign.
    """
    if not a.values.numel() or not b.values.numel():
        return a.values.new_zeros(a.values.shape[0], b.values.shape[0])
    c = _sums(a, b, how)
    marked = [_marked(x) for x in (a, b)]
    odd = [x.isfinite().logical_not().any(-1) for x in marked]
    if not (odd[0].any() or odd[1].any()):
        return c
    product = torch.matmul(marked[0], marked[1].mT)
    nan = torch.full((), 0x7FFFFFFF, dtype=torch.int32, device=c.device).view(torch.float32)
    return torch.where(odd[0][:, None] | odd[1], torch.where(product.isnan(), nan, product), c)


def _marked(x: Matrix) -> Tensor:
    """The values, NaN where their scale is."""
    if x.scales is None:
        return x.values
    scales = x.scales.repeat_interleave(x.along, -1)[:, : x.values.shape[1]]
    return torch.where(scales.isnan(), scales, x.values)


def _sums(a: Matrix, b: Matrix, how: Instruction) -> Tensor:
    """`dot` with zeros for Inf and NaN, and scales of 1 for NaN; tile by tile."""
    (m, k), n = a.values.shape, b.values.shape[0]
    add, whole = _adder(how, m * n * k, a.values.device)
    right = [_parts(tile, how.step) for tile in _tiles(b, TILE[1], whole)]
    bands = []
    for tile in _tiles(a, TILE[0], whole):
        parts, sums = _parts(tile, how.step), []
        for others in right:
            c = a.values.new_zeros(parts[0].values.shape[1], others[0].values.shape[1])
            for first, second in zip(parts, others, strict=True):
                c = add(first, second, c, how)
            sums.append(c)
        bands.append(torch.cat(sums, 1))
    return torch.cat(bands)[:m, :n]


def _tiles(x: Matrix, rows: int, whole: bool) -> Iterator[Matrix]:
    """``x`` in parts of so many rows; the last is padded with zeros if ``whole``."""
    for start in range(0, x.values.shape[0], rows):
        values, scales = x.values[start : start + rows], x.scales
        if scales is not None and scales.shape[0] > 1:
            scales = scales[start : start + rows]
        missing = rows - values.shape[0] if whole else 0
        if missing:
            values = F.pad(values, (0, 0, 0, missing))
            if scales is not None and scales.shape[0] > 1:
                scales = F.pad(scales, (0, 0, 0, missing), value=1.0)
        yield x._replace(values=values, scales=scales)


def _parts(x: Matrix, step: int) -> list[Part]:
    values = torch.where(x.values.isfinite(), x.values, 0.0).mT
    values = F.pad(values, (0, 0, 0, -values.shape[0] % step)).contiguous()
    exponents = exponent_of(values, x.low)
    parts = []
    for start in range(0, values.shape[0], step):
        scale = None
        if x.scales is not None:
            scale = x.scales[:, start // x.along : -(-(start + step) // x.along)].nan_to_num(1.0)
            scale = F.pad(scale, (0, max(step // x.along, 1) - scale.shape[1]), value=1.0)
        of = slice(start, start + step)
        parts.append(Part(values[of], exponents[of], scale, x.scale_low))
    return parts


_DONE: Counter[Any] = Counter()
"""Instruction -> the number of products that were summed in eager mode."""


def _adder(how: Instruction, products: int, device: torch.device) -> tuple[Any, bool]:
    """The function that adds a step, and whether it takes whole tiles only: it is compiled once
    `EAGER` products were summed on a CPU."""
    if device.type != "cpu" or _DONE[how] + products < EAGER:
        _DONE[how] += products
        return ADDITIONS[how.add], False
    return _compiled(ADDITIONS[how.add]), True


@cache
def _compiled(add: Callable[..., Tensor]) -> Callable[..., Tensor]:
    used = torch.compile(add, dynamic=False)

    def call(*args: Any) -> Tensor:
        nonlocal used
        try:
            return used(*args)
        except RuntimeError as error:  # no compiler
            if used is add:
                raise
            used = add
            warnings.warn(_SLOW.format(error), RuntimeWarning, stacklevel=2)
        return add(*args)

    return call


_SLOW = (
    "the sums of a tensor core could not be compiled ({!s:.200}): they run in eager mode, about "
    "ten times slower"
)
