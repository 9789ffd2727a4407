"""Activations that save less for the backward pass, as a recipe's `saved_activations` specifies.

PyTorch saves the full-precision input of GELU and SiLU, which is four times as wide as the model.
Here it is saved in the bytes of a format, like an operand of a product. The output equals that of
PyTorch bit for bit; the gradient is the derivative at the rounded input. ReLU needs one bit per
element, and its gradient equals that of PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..casts.casting import LoweredCast, as_read, cast_values, lowered
from ..casts.operands import SavedOperand, save_operands, saved_operands
from ..common.compiler import apply, in_graph
from ..recipes.cast import Cast

aten = torch.ops.aten


class ActivationKernel(NamedTuple):
    """A row of KERNELS: a function of one or two tensors and settings; its gradient or gradients, a
    function of the output's gradient, the tensors and the settings; and a differentiable form of
    these."""

    function: Callable[..., Tensor]
    gradient: Callable[..., Any]
    differentiable: Callable[..., Any]


def _gelu_gradient(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    return aten.gelu_backward.default(grad, x, approximate=approximate)


def _silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Written out, because torch's own kernel is not differentiable."""
    gate = torch.sigmoid(x)
    return grad * gate * (1 + x * (1 - gate))


def _factors_gradients(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return grad * b, grad * a


KERNELS: dict[str, ActivationKernel] = {
    "gelu": ActivationKernel(
        lambda x, approximate: aten.gelu.default(x, approximate=approximate),
        _gelu_gradient,
        _gelu_gradient,
    ),
    "silu": ActivationKernel(aten.silu.default, aten.silu_backward.default, _silu_gradient),
    "glu": ActivationKernel(aten.glu.default, aten.glu_backward.default, aten.glu_backward.default),
    "gate": ActivationKernel(aten.mul.Tensor, _factors_gradients, _factors_gradients),
}
"""Name -> kernels."""


class _Activation(Function):
    """A function of KERNELS. Arguments: one tensor or two; for each, what is saved, with its scale
    factor; the name; the settings; the spec of the saved tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor | None,
        saved: tuple[tuple[Tensor, Tensor | None], ...],
        name: str,
        settings: tuple[Any, ...],
        spec: LoweredCast,
    ) -> Tensor:
        return KERNELS[name].function(*((a,) if b is None else (a, b)), *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, saved, ctx.name, ctx.settings, spec = inputs
        pairs = zip((a, b), saved, strict=False)
        save_operands(ctx, *(SavedOperand(x, spec, scale, of) for of, (x, scale) in pairs))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = saved_operands(ctx, grad.dtype)
        kernel = KERNELS[ctx.name]
        gradient = kernel.differentiable if torch.is_grad_enabled() else kernel.gradient
        gradients = gradient(grad, *saved, *ctx.settings)
        da, db = gradients if isinstance(gradients, tuple) else (gradients, None)
        return da, db, *[None] * 4


class _Relu(Function):
    """ReLU that saves one bit per element: whether the gradient passes (it does where the input
    is NaN)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return aten.relu.default(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(_bits(~(inputs[0] <= 0)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (bits,) = ctx.saved_tensors
        return torch.where(_mask(bits, grad), grad, 0.0)


def _eight(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)[:, None]


def _bits(mask: Tensor) -> Tensor:
    """Packs a mask, eight elements per byte: uint8 (ceil(elements / 8),), bit i from the i-th
    eighth."""
    flat = aten.constant_pad_nd.default(mask.flatten(), [0, -mask.numel() % 8])
    return (flat.view(8, -1).to(torch.uint8) << _eight(mask)).sum(0, dtype=torch.uint8)


def _mask(bits: Tensor, like: Tensor) -> Tensor:
    """Unpacks the result of `_bits` to the shape of ``like``."""
    flat = ((bits >> _eight(bits)) & 1).flatten()
    return flat[: like.numel()].view(like.shape).bool()


def _applies(*tensors: object) -> bool:
    """Whether autograd saves these tensors."""
    return torch.is_grad_enabled() and all(
        isinstance(t, Tensor) and t.requires_grad and t.dtype.is_floating_point for t in tensors
    )


@in_graph
def _activated(
    a: Tensor, b: Tensor | None, name: str, settings: tuple[Any, ...], spec: LoweredCast
) -> Tensor:
    tensors = [as_read(x) for x in (a, b) if x is not None]
    saved = tuple(cast_values(x.detach(), spec) for x in tensors)
    second = None if b is None else tensors[1]
    return apply(_Activation, tensors[0], second, saved, name, settings, spec)


def _gelu(cast: Cast, input: Tensor, *, approximate: str = "none") -> Any:
    if not _applies(input) or approximate not in ("none", "tanh"):
        return NotImplemented
    return _activated(input, None, "gelu", (approximate,), lowered(cast))


def _silu(cast: Cast, input: Tensor, inplace: bool = False) -> Any:
    if not _applies(input):
        return NotImplemented
    output = _activated(input, None, "silu", (), lowered(cast))
    return input.copy_(output) if inplace else output


def _glu(cast: Cast, input: Tensor, dim: int = -1) -> Any:
    if not _applies(input):
        return NotImplemented
    return _activated(input, None, "glu", (dim,), lowered(cast))


def _relu(cast: Cast, input: Tensor, inplace: bool = False) -> Any:
    if not _applies(input):
        return NotImplemented
    output = apply(_Relu, input)
    return input.copy_(output) if inplace else output


def _gate(cast: Cast, input: Tensor, other: Any, *, out: Tensor | None = None) -> Any:
    """The product of two tensors of equal shape that both need a gradient, as in the gate of
    SwiGLU. Not for a broadcast factor (of a norm, of a rotary embedding), nor for a square."""
    if out is not None or input is other or not _applies(input, other):
        return NotImplemented
    if input.shape != other.shape or input.dtype != other.dtype:
        return NotImplemented
    return _activated(input, other, "gate", (), lowered(cast))


ACTIVATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.gelu: _gelu,
    F.silu: _silu,
    F.glu: _glu,
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), partial(_relu, inplace=True)),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), _gate),
    **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__, operator.mul), _gate),
}
"""Torch function -> its implementation under `saved_activations`: (cast, *args, **kwargs) -> the
result, or NotImplemented if torch should compute the call."""
