"""Layer norm over the channels of each pixel: permute, `torch.nn.functional.layer_norm`, permute
back, and, unless the input is channels-last, a copy to the memory format of the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from ..common.compiler import FIRST_LOOK, apply, same


def layer_norm2d(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """`torch.nn.functional.layer_norm` over dimension 1, as in ConvNeXt.

    input: (batch, channels, ...), floating point, any strides. weight, bias: (channels,) or None,
    any floating-point dtype. eps: added to the variance. The output and the gradient of the input
    have the memory format of the input (`torch.preserve_format`); exported, and compiled by torch
    2.11, the output alone. Statistics and roundings are those of torch. `torch.autocast` has no
    effect. NaN or Inf makes its pixel NaN. Raises ValueError for an input of fewer than two
    dimensions and for a weight or bias of another shape, TypeError for an input that is not
    floating point.
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):  # lets modes intercept it, like torch.nn.functional
        return handle_torch_function(layer_norm2d, tensors, input, weight, bias, eps)
    if FIRST_LOOK.items and torch.compiler.is_compiling():  # modes then only see calls of torch
        mode = FIRST_LOOK.items.pop()
        try:
            return mode.__torch_function__(layer_norm2d, (), (input, weight, bias, eps))
        finally:
            FIRST_LOOK.items.append(mode)
    _check(input, weight, bias)
    in_graph = torch.compiler.is_compiling()
    # In torch 2.11 every graph counts as exported.
    exports = in_graph and torch.compiler.is_exporting()
    if torch.is_grad_enabled() and not exports and not _is_channels_last(input):
        input = apply(_FormatOfGradient if in_graph else _WithTangent, input)
    return _permuted(input, weight, bias, eps)


def _check(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if input.ndim < 2:
        raise ValueError(f"layer_norm2d takes (batch, channels, ...), got {input.ndim} dimensions")
    if not input.dtype.is_floating_point:
        raise TypeError(f"layer_norm2d takes a floating-point input, got {input.dtype}")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != input.shape[1:2]:
            raise ValueError(
                f"{name} must have shape ({input.shape[1]},), got {tuple(value.shape)}"
            )


def _permuted(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By torch's kernel, which takes parameters in the dtype of x, or in float32 for 16-bit x."""
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    last = x.movedim(1, -1)
    y = torch.layer_norm(last, last.shape[-1:], weight, bias, eps).movedim(-1, 1)
    return _with_strides(y, _strides(x))


def _strides(x: Tensor) -> list[int]:
    """The strides of ``x`` under `torch.preserve_format`: its own, or dense ones in their order."""
    return list(torch.empty_like(x, device=torch.device("meta")).stride())


def _with_strides(value: Tensor, strides: list[int]) -> Tensor:
    """``value``, copied if its strides are others. `torch.func.vmap` allows no write of a batch to
    a tensor without one, so that ``value`` makes the tensor to copy to."""
    return value if list(value.stride()) == strides else _copied(value, strides)


def _copied(value: Tensor, strides: list[int]) -> Tensor:
    return value.new_empty_strided(value.size(), strides).copy_(value)


def _is_channels_last(x: Tensor) -> bool:
    """Whether the output and the gradient need no copy."""
    strides, expected = _strides(x), 1
    for dim in (1, *range(x.ndim - 1, 1, -1), 0):
        if strides[dim] != expected:
            return False
        expected *= max(x.shape[dim], 1)
    return True


class _FormatOfGradient(Function):
    """``x``, whose gradient gets the memory format of ``x``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return same(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.strides = _strides(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # Whatever strides it is traced with.
        return _copied(grad, ctx.strides)


class _WithTangent(_FormatOfGradient):
    """In eager mode; torch.compile traces no ``jvp``."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _with_strides(grad, ctx.strides)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return same(tangent)
