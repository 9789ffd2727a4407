"""Random Hadamard rotations of the operands of a product."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..common.compiler import compiled_as
from ..common.dtensor import as_shard, check_whole, is_dtensor
from ..formats.random_bits import KEY_START, bits_from_key, drawn_key
from ..recipes.cast import Cast

aten = torch.ops.aten


def _hadamard_matrix(size: int, like: Tensor) -> Tensor:
    """Sylvester's matrix: (i, j) -> (-1)**popcount(i & j) * sign[j] / sqrt(size)."""
    index = torch.arange(size, device=like.device)
    places = torch.arange(size.bit_length(), device=like.device)
    bits = (index[:, None] >> places & 1).float()
    negative = aten.matmul.default(bits, bits.mT).remainder(2)
    # One vector of signs for all products, as in arXiv:2509.25149, section 4.2: bits of pi.
    signs = [1.0 - 2.0 * (KEY_START >> (62 - j % 63) & 1) for j in range(size)]
    signed = (1 - 2 * negative) * torch.tensor(signs, device=like.device)
    return signed.to(like.dtype) * (1 / math.sqrt(size))


def rotation_signs(spec: Cast | None, like: Tensor) -> Tensor | None:
    """Random signs, (hadamard,), for both operands of a product; None if they are fixed."""
    if spec is None or spec.signs == "fixed":
        return None
    if is_dtensor(like):
        raise ValueError(
            'random signs differ under tensor parallelism; take signs="fixed"'
        )
    bits = bits_from_key((spec.hadamard,), drawn_key(like.device), device=like.device)
    return _after(1.0 - 2.0 * (bits & 1), like)


# Else torch 2.13 may draw other signs in the backward graph.
@compiled_as(lambda x, like: x + like[:0].sum())
def _after(x: Tensor, like: Tensor) -> Tensor:
    """``x``, computed after ``like`` in a graph."""
    return x


def rotated(x: Tensor, size: int, axis: int, signs: Tensor | None = None) -> Tensor:
    """``x``, padded with zeros, times an orthogonal matrix in blocks of ``size`` along ``axis``:
    cancels in a product, spreads an outlier over its block. signs: of the elements of a block."""
    if is_dtensor(x):
        check_whole(x, axis, size)
        local = x.to_local()  # type: ignore[attr-defined]
        return as_shard(x, rotated(local, size, axis, signs))
    count = -(-x.shape[axis] // size)
    missing = count * size - x.shape[axis]
    if missing:
        sides = [0, missing] if axis == -1 else [0, 0, 0, missing]
        x = aten.constant_pad_nd.default(x, sides)
    blocks = torch.unflatten(x, axis, (count, size))
    if signs is not None:
        blocks = blocks * (signs if axis == -1 else signs[:, None]).to(x.dtype)
    with without_autocast(x):
        matrix = _hadamard_matrix(size, x)
        if axis == -1:
            return aten.matmul.default(blocks, matrix.mT).flatten(-2)
        return aten.matmul.default(matrix, blocks).flatten(-3, -2)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context without the `torch.autocast` of the device of ``x``; the meta device has none."""
    if x.is_meta:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
