"""Convolutions as products: the same three GEMMs, scales and casts as in `fp8.matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .matmul import (
    ONES,
    active_recipe,
    cast_backward,
    cast_forward,
    check_scales,
    to_autocast_dtype,
)
from .recipe import Recipe

__all__ = ["conv"]

aten = torch.ops.aten


class _ScaledConvolution(Function):
    """A convolution whose output and two gradients each have a scale.

    The scale multiplies the smaller tensor (the weight, or the weight's gradient) rather than the
    feature maps; `aten.convolution_backward` is itself differentiable.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scales: tuple[float, float, float],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> Tensor:
        none = [0] * len(stride)
        return aten.convolution.default(
            input, weight * scales[0], bias, stride, padding, dilation, False, none, groups
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias, ctx.scales, *ctx.geometry = inputs
        ctx.bias_size = None if bias is None else list(bias.shape)
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        _, s_dx, s_dw = ctx.scales
        mask = list(ctx.needs_input_grad[:3])
        dx, dw, db = aten.convolution_backward.default(
            grad,
            input,
            weight * s_dx,
            ctx.bias_size,
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            groups,
            mask,
        )
        dw = dw * s_dw if mask[1] else None
        db = db * s_dw if mask[2] else None
        return dx if mask[0] else None, dw, db, None, None, None, None, None


def _per_dim(value: int | Sequence[int], dims: int, what: str) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    values = values * dims if len(values) == 1 else values
    if len(values) != dims:
        raise ValueError(f"{what} needs {dims} numbers, got {value!r}")
    return values


def _padded(
    input: Tensor, weight: Tensor, padding: str | int | Sequence[int], dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """The input and the symmetric padding left to do, with "same" resolved as torch does."""
    dims = weight.dim() - 2
    if not isinstance(padding, str):
        return input, _per_dim(padding, dims, "padding")
    if padding == "valid":
        return input, [0] * dims
    if padding != "same":
        raise ValueError(f"padding must be 'same', 'valid' or numbers, got {padding!r}")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    odd = [t % 2 for t in total]
    if any(odd):  # the extra element goes on the right, as in torch
        input = F.pad(input, [side for extra in reversed(odd) for side in (0, extra)])
    return input, [t // 2 for t in total]


def conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    scales: tuple[float, float, float] = ONES,
    recipe: Recipe | None = None,
) -> Tensor:
    """``s_y * conv(input, weight) + bias`` in one, two or three dimensions.

    input: (batch, in, *size) or (in, *size). weight: (out, in / groups, *kernel). The number of
    dimensions of the weight says which convolution it is; the other arguments are those of
    `torch.nn.functional.conv1d`, conv2d and conv3d.
    scales, recipe: as in `fp8.matmul.linear`.
    """
    recipe = recipe or active_recipe()
    check_scales(scales)
    dims = weight.dim() - 2
    if dims not in (1, 2, 3):
        raise ValueError(f"conv needs a weight of 3 to 5 dimensions, got {tuple(weight.shape)}")
    if input.dim() not in (dims + 1, dims + 2):
        raise ValueError(
            f"conv with a weight of shape {tuple(weight.shape)} needs an input of {dims + 1} or "
            f"{dims + 2} dimensions, got shape {tuple(input.shape)}"
        )
    if recipe is not None:
        input, weight = cast_forward(input, recipe.input), cast_forward(weight, recipe.weight)
    input, weight, bias = to_autocast_dtype(input, weight, bias)
    batched = input if input.dim() == dims + 2 else input.unsqueeze(0)
    steps = _per_dim(dilation, dims, "dilation")
    batched, margins = _padded(batched, weight, padding, steps)
    geometry = (_per_dim(stride, dims, "stride"), margins, steps, groups)
    if recipe is not None and recipe.grad is not None:
        y = _ScaledConvolution.apply(batched, weight, None, scales, *geometry)
        y = cast_backward(y, recipe.grad)
        if bias is not None:  # its gradient sums the output's gradient before the cast
            y = y + _scaled_gradient(bias, scales[2]).reshape(-1, *[1] * dims)
    else:
        y = _ScaledConvolution.apply(batched, weight, bias, scales, *geometry)
    return y if input.dim() == dims + 2 else y.squeeze(0)


class _ScaleGradient(Function):
    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def _scaled_gradient(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else _ScaleGradient.apply(x, scale)
