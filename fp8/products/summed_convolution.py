"""Convolutions whose sums are those of a tensor core, as implicit products of matrices.

A sum goes over the kernel positions, the last dimension fastest, and at each over the channels. The
input gradient sums over kernel positions and output channels; where the stride or an edge leaves no
output, a zero is added. The gradient of the weight sums over the batch and, within it, over output
positions. Each group is a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.codes import Codes
from ..casts.operands import Casts
from .summed import KINDS, Kind, Specs, multiply, product

aten = torch.ops.aten


class _Geometry(NamedTuple):
    """The arguments of `aten.convolution`."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @property
    def turned(self) -> _Geometry:
        """That of the convolution which computes the input gradient."""
        return self._replace(transposed=not self.transposed)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: tuple[float, float, float],
    geometry: tuple[Any, ...],
    casts: Casts,
    histories: list[Tensor | None],
    sums: str,
    dtype: str,
) -> Tensor:
    """``s_y * convolution(x, weight) + bias`` in ``dtype``, for casts with one scale for each
    operand.

    x: (batch, channels, *size). weight, geometry: as in `aten.convolution`; what does not fit
    raises its error. casts, histories, sums, dtype and the bias: as in `fp8.products.summed`.
    """
    with torch.no_grad():
        shapes = (torch.empty(t.shape, device="meta") for t in (x, weight))
        size = aten.convolution.default(*shapes, None, *geometry).shape[2:]
    how = (geometry, tuple(size), tuple(x.shape[2:]), tuple(weight.shape[2:]))
    settings = (scales, casts, histories, sums, dtype)
    return product(x, weight, bias, *settings, kind="convolution", how=how)


def _output(x: Codes, w: Codes, specs: Specs, sums: str, _: Any, how: tuple[Any, ...]) -> Tensor:
    geometry, size, _, _ = how
    return _convolved(x, w, specs, _Geometry(*geometry), size, sums)


def _grad_x(g: Codes, w: Codes, specs: Specs, sums: str, _: Any, how: tuple[Any, ...]) -> Tensor:
    geometry, _, size, _ = how
    return _convolved(g, w.mT, specs, _Geometry(*geometry).turned, size, sums)


def _grad_w(g: Codes, x: Codes, specs: Specs, sums: str, _: Any, how: tuple[Any, ...]) -> Tensor:
    geometry, _, _, kernel = how
    return _of_weight(x.mT, g.mT, specs[::-1], kernel, _Geometry(*geometry), sums)


KINDS["convolution"] = Kind(_output, _grad_x, _grad_w)


def _convolved(
    maps: Codes,
    kernels: Codes,
    specs: Specs,
    how: _Geometry,
    size: Sequence[int],
    sums: str,
) -> Tensor:
    """The convolution, (batch, channels, *size), in the dtype of `multiply`."""
    batch, w = maps.values.shape[0], kernels.values
    left = maps._replace(values=_unfolded(maps.values, w.shape[2:], how, size))
    if how.transposed:  # (groups, inputs of one, outputs of one, *kernel)
        w = w.unflatten(0, (how.groups, -1)).transpose(1, 2)
    else:
        w = w.unflatten(0, (how.groups, -1))
    right = kernels._replace(values=w.movedim(2, -1).flatten(2))
    y = multiply(left, right, *specs, sums)
    return y.unflatten(1, (batch, *size)).movedim(-1, 1).movedim(2, 0).flatten(1, 2)


def _of_weight(
    x: Codes,
    grad: Codes,
    specs: Specs,
    kernel: Sequence[int],
    how: _Geometry,
    sums: str,
) -> Tensor:
    """The gradient of the weight. specs: of x, of grad."""
    if how.transposed:  # the maps that the kernel moves over, and those with one position for each
        x, grad, specs = grad, x, specs[::-1]
    size = grad.values.shape[2:]
    moved = x._replace(values=_unfolded(x.values, kernel, how._replace(transposed=False), size).mT)
    still = grad._replace(
        values=grad.values.unflatten(1, (how.groups, -1)).movedim(0, 2).flatten(2)
    )
    y = multiply(moved, still, *specs, sums)
    return y.unflatten(1, (*kernel, -1)).movedim((-1, -2), (1, 2)).flatten(0, 1)


def _unfolded(x: Tensor, kernel: Sequence[int], how: _Geometry, size: Sequence[int]) -> Tensor:
    """What each output reads: (groups, batch * positions, kernel positions * channels of one)."""
    dims, channels = len(size), x.shape[1] // how.groups
    x = x.movedim(1, -1)
    for d in range(dims):
        x = F.pad(x, [0, 0] * (dims - d) + [0, 1])
        index = _positions(x.shape[1 + d] - 1, size[d], kernel[d], how, d, x.device)
        x = x.index_select(1 + d, index.flatten())
    shape = [side for pair in zip(size, kernel, strict=True) for side in pair]
    x = x.reshape(x.shape[0], *shape, how.groups, channels)
    positions, taps = range(1, 2 * dims + 1, 2), range(2, 2 * dims + 1, 2)
    x = x.permute(2 * dims + 1, 0, *positions, *taps, 2 * dims + 2)
    return x.flatten(dims + 2).flatten(1, dims + 1)


def _positions(
    length: int, size: int, kernel: int, how: _Geometry, dim: int, device: torch.device
) -> Tensor:
    """The position that output and kernel position read along a dimension, (size, kernel);
    ``length`` for none."""
    stride, padding, dilation = how.stride[dim], how.padding[dim], how.dilation[dim]
    output, tap = torch.arange(size, device=device)[:, None], torch.arange(kernel, device=device)
    if how.transposed:
        moved = output + padding - dilation * tap
        at, exists = moved // stride, moved % stride == 0
    else:
        at = output * stride - padding + dilation * tap
        exists = torch.ones_like(at, dtype=torch.bool)
    return torch.where(exists & (at >= 0) & (at < length), at, length)
