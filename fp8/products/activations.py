"""Activations that save less for the backward pass, as a recipe's `saved_activations` specifies.

PyTorch saves the full-precision input of GELU and SiLU, which is four times as wide as the model.
Here it is saved in the bytes of a format, like an operand of a product. The output equals that of
PyTorch bit for bit; the gradient is the derivative at the rounded input. ReLU needs one bit per
element, and its gradient equals that of PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..casts.casting import Spec, rounded, spec_of
from ..casts.saved_operands import save_operands, saved_operands
from ..common.compiler import apply, in_graph
from ..recipes.cast import Cast

aten = torch.ops.aten


class ActivationKernel(NamedTuple):
    """A row of KERNELS: a function of a tensor and settings; its gradient, a function of the
    output's gradient, the tensor and the settings; and a differentiable form of that gradient."""

    function: Callable[..., Tensor]
    gradient: Callable[..., Tensor]
    differentiable: Callable[..., Tensor]


def _gelu_gradient(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    return aten.gelu_backward.default(grad, x, approximate=approximate)


def _silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Written out, because torch's own kernel is not differentiable."""
    gate = torch.sigmoid(x)
    return grad * gate * (1 + x * (1 - gate))


KERNELS: dict[str, ActivationKernel] = {
    "gelu": ActivationKernel(
        lambda x, approximate: aten.gelu.default(x, approximate=approximate),
        _gelu_gradient,
        _gelu_gradient,
    ),
    "silu": ActivationKernel(aten.silu.default, aten.silu_backward.default, _silu_gradient),
    "glu": ActivationKernel(aten.glu.default, aten.glu_backward.default, aten.glu_backward.default),
}
"""Name -> kernels."""


class _Activation(Function):
    """A function of KERNELS. Arguments: x; the tensor saved for it and its scale factor; the name;
    the settings; the spec of the saved tensor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        kept_x: Tensor,
        scale: Tensor | None,
        name: str,
        settings: tuple[Any, ...],
        spec: Spec | None,
    ) -> Tensor:
        return KERNELS[name].function(x, *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, kept_x, scale, ctx.name, ctx.settings, spec = inputs
        save_operands(ctx, (kept_x, spec, scale))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved_operands(ctx, grad.dtype)
        kernel = KERNELS[ctx.name]
        gradient = kernel.differentiable if torch.is_grad_enabled() else kernel.gradient
        return gradient(grad, x, *ctx.settings), *[None] * 5


class _Gate(Function):
    """``a * b``. Arguments: both factors; the tensors saved for them and their scale factors;
    the spec."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        kept_a: Tensor,
        kept_b: Tensor,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
        spec: Spec | None,
    ) -> Tensor:
        return aten.mul.Tensor(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, kept_a, kept_b, scale_a, scale_b, spec = inputs
        save_operands(ctx, (kept_a, spec, scale_a), (kept_b, spec, scale_b))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = saved_operands(ctx, grad.dtype)
        return grad * b, grad * a, *[None] * 5


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
def _activated(x: Tensor, name: str, settings: tuple[Any, ...], spec: Spec) -> Tensor:
    return apply(_Activation, x, *rounded(x, spec), name, settings, spec)


def _gelu(cast: Cast, input: Tensor, *, approximate: str = "none") -> Any:
    if not _applies(input) or approximate not in ("none", "tanh"):
        return NotImplemented
    return _activated(input, "gelu", (approximate,), spec_of(cast))


def _silu(cast: Cast, input: Tensor, inplace: bool = False) -> Any:
    if not _applies(input):
        return NotImplemented
    output = _activated(input, "silu", (), spec_of(cast))
    return input.copy_(output) if inplace else output


def _glu(cast: Cast, input: Tensor, dim: int = -1) -> Any:
    return _activated(input, "glu", (dim,), spec_of(cast)) if _applies(input) else NotImplemented


def _relu(cast: Cast, input: Tensor, inplace: bool = False) -> Any:
    if not _applies(input):
        return NotImplemented
    output = apply(_Relu, input)
    return input.copy_(output) if inplace else output


def _relu_(cast: Cast, input: Tensor) -> Any:
    return _relu(cast, input, inplace=True)


def _gate(cast: Cast, input: Tensor, other: Any, *, out: Tensor | None = None) -> Any:
    """The product of two tensors of equal shape that both need a gradient, as in the gate of
    SwiGLU. Not for a broadcast factor (of a norm, of a rotary embedding), nor for a square."""
    if out is not None or input is other or not _applies(input, other):
        return NotImplemented
    if input.shape != other.shape or input.dtype != other.dtype:
        return NotImplemented
    return _gated(input, other, spec_of(cast))


@in_graph
def _gated(input: Tensor, other: Tensor, spec: Spec) -> Tensor:
    (a, scale_a), (b, scale_b) = rounded(input, spec), rounded(other, spec)
    return apply(_Gate, input, other, a, b, scale_a, scale_b, spec)


ACTIVATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.gelu: _gelu,
    F.silu: _silu,
    F.glu: _glu,
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), _relu_),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), _gate),
    **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__, operator.mul), _gate),
}
"""Torch function -> its implementation under `saved_activations`: (cast, *args, **kwargs) -> the
result, or NotImplemented if torch should compute the call."""
