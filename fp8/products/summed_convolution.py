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
from torch.autograd import Function
from torch.nn import functional as F

from ..casts.casting import Spec
from ..casts.codes import Codes
from ..casts.operands import Casts, one_copy
from .summed import add_bias, multiply, operand, refuse_second_derivative

__all__ = ["convolution"]

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
    of_x, of_w, of_grad = histories
    record = torch.is_grad_enabled()
    with torch.no_grad():
        shapes = (torch.empty(t.shape, device="meta") for t in (x, weight))
        size = aten.convolution.default(*shapes, None, *geometry).shape[2:]
        maps = operand(x, casts.a, -1, of_x, record)
        kernels = operand(weight, casts.b, -1, of_w, record)
    settings = (*scales, geometry, tuple(size), casts, sums, dtype)
    y = _Convolution.apply(x, weight, of_grad, *settings, *maps, *kernels)
    return y if bias is None else add_bias(y, bias, scales[2])


class _Convolution(Function):
    """`convolution` without a bias. x and weight receive the gradients; the last six arguments are
    their codes. size: that of the output."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        history: Tensor | None,
        s_y: float,
        s_x: float,
        s_w: float,
        geometry: tuple[Any, ...],
        size: tuple[int, ...],
        casts: Casts,
        sums: str,
        dtype: str,
        *operands: Tensor | None,
    ) -> Tensor:
        maps, kernels = Codes(*operands[:3]), Codes(*operands[3:])  # type: ignore[arg-type]
        how = _Geometry(*geometry)
        return (_convolved(maps, kernels, casts[:2], how, size, sums) * s_y).to(
            getattr(torch, dtype)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.history, _, ctx.s_x, ctx.s_w, geometry, _, casts, ctx.sums, _, *rest = inputs
        ctx.geometry, ctx.casts = _Geometry(*geometry), casts
        ctx.shapes, ctx.dtypes = (x.shape, weight.shape), (x.dtype, weight.dtype)
        keep_x = one_copy(casts.a, casts.a_again)
        keep_w = one_copy(casts.b, casts.b_again)
        of_x = rest[:3] if keep_x else (x, None, None)
        of_w = rest[3:] if keep_w else (weight, None, None)
        ctx.save_for_backward(*of_x, *of_w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        casts, saved, how = ctx.casts, ctx.saved_tensors, ctx.geometry
        x_shape, w_shape = ctx.shapes
        dx = dw = g = None
        if ctx.needs_input_grad[0]:
            specs = (casts.grad_for_a, casts.b_again)
            g, w = operand(grad, specs[0], -1, ctx.history, True), _again(saved[3:], specs[1])
            dx = _convolved(g, w, specs, how.turned, x_shape[2:], ctx.sums) * ctx.s_x
            dx = dx.to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            specs = (casts.a_again, casts.grad_for_b)
            if g is None or not one_copy(casts.grad_for_a, casts.grad_for_b):
                g = operand(grad, specs[1], -1, ctx.history, True)
            x = _again(saved[:3], specs[0])
            dw = _of_weight(x, g, specs, w_shape[2:], how, ctx.sums) * ctx.s_w
            dw = dw.to(ctx.dtypes[1])
        return dx, dw, *[None] * 15


def _again(saved: Sequence[Any], spec: Spec | None) -> Codes:
    """The codes of an operand for its second product. saved: its codes, or itself without them."""
    return operand(saved[0], spec) if saved[1] is None else Codes(*saved)


def _convolved(
    maps: Codes,
    kernels: Codes,
    specs: tuple[Spec | None, Spec | None],
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
    specs: tuple[Spec | None, Spec | None],
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
