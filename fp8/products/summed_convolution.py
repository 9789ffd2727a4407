"""Convolutions whose sums are those of a tensor core, as implicit products of matrices.

A sum goes over the kernel positions, the last dimension fastest, and at each over the channels. The
input gradient sums over kernel positions and output channels; where the stride or an edge leaves no
output, a zero is added. The gradient of the weight sums over the batch and, within it, over output
positions. Each group is a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import Spec
from ..casts.codes import Codes
from ..casts.operands import Casts
from .summed import KINDS, Kind, Scales, Settings, multiply, product

aten = torch.ops.aten


class Geometry(NamedTuple):
    """The arguments of `aten.convolution`."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @property
    def turned(self) -> Geometry:
        """That of the convolution which computes the input gradient."""
        return self._replace(transposed=not self.transposed)


class _Sizes(NamedTuple):
    """The sizes of the output, the input and the kernel of a convolution."""

    output: tuple[int, ...]
    input: tuple[int, ...]
    kernel: tuple[int, ...]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Scales,
    geometry: Geometry,
    casts: Casts,
    histories: list[Tensor | None],
    sums: str,
    dtype: str,
) -> Tensor:
    """``s_y * convolution(x, weight) + bias`` in ``dtype``, for casts with one scale for each
    operand.

    x: (batch, channels, *size). weight: as in `aten.convolution`; what does not fit raises its
    error. casts, histories, sums, dtype and the bias: as in `fp8.products.summed`.
    """
    with torch.no_grad():
        shapes = (torch.empty(t.shape, device="meta") for t in (x, weight))
        size = aten.convolution.default(*shapes, None, *geometry).shape[2:]
    how = (geometry, _Sizes(tuple(size), tuple(x.shape[2:]), tuple(weight.shape[2:])))
    settings = (scales, casts, histories, sums, dtype)
    return product(x, weight, bias, *settings, kind="convolution", geometry=how)


def _output(x: Codes, w: Codes, of_x: Spec, of_w: Spec, _: None, how: Settings) -> Tensor:
    geometry, sizes = how.geometry
    return _convolved(x, w, of_x, of_w, geometry, sizes.output, how)


def _grad_x(g: Codes, w: Codes, of_g: Spec, of_w: Spec, _: None, how: Settings) -> Tensor:
    geometry, sizes = how.geometry
    return _convolved(g, w.mT, of_g, of_w, geometry.turned, sizes.input, how)


def _convolved(
    maps: Codes,
    kernels: Codes,
    of_maps: Spec,
    of_kernels: Spec,
    geometry: Geometry,
    size: Sequence[int],
    how: Settings,
) -> Tensor:
    """The convolution, (batch, channels, *size), in the dtype of `multiply`."""
    batch, w = maps.values.shape[0], kernels.values
    left = maps._replace(values=_unfolded(maps.values, w.shape[2:], geometry, size))
    w = w.unflatten(0, (geometry.groups, -1))
    if geometry.transposed:  # (groups, inputs of one, outputs of one, *kernel)
        w = w.transpose(1, 2)
    right = kernels._replace(values=w.movedim(2, -1).flatten(2))
    y = multiply(left, right, of_maps, of_kernels, None, how)
    return y.unflatten(1, (batch, *size)).movedim(-1, 1).movedim(2, 0).flatten(1, 2)


def _grad_w(g: Codes, x: Codes, of_g: Spec, of_x: Spec, _: None, how: Settings) -> Tensor:
    geometry, sizes = how.geometry
    x, g = x.mT, g.mT
    if geometry.transposed:  # the maps that the kernel moves over, and those with one position each
        x, g, of_x, of_g = g, x, of_g, of_x
    plain = geometry._replace(transposed=False)
    moved = x._replace(values=_unfolded(x.values, sizes.kernel, plain, g.values.shape[2:]).mT)
    by_group = g.values.unflatten(1, (geometry.groups, -1)).movedim(0, 2).flatten(2)
    y = multiply(moved, g._replace(values=by_group), of_x, of_g, None, how)
    return y.unflatten(1, (*sizes.kernel, -1)).movedim((-1, -2), (1, 2)).flatten(0, 1)


KINDS["convolution"] = Kind(_output, _grad_x, _grad_w)


def _unfolded(x: Tensor, kernel: Sequence[int], how: Geometry, size: Sequence[int]) -> Tensor:
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
    length: int, size: int, kernel: int, how: Geometry, dim: int, device: torch.device
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
