"""Activations that apply their scale with no more passes over memory than they must, in eager mode.

As a multiplication of its own, a scale costs an activation a pass and a tensor in each direction.
Here it multiplies fresh results in place, and a product takes it along (``addcmul``). A compiled
graph fuses all that by itself, so there, and for tensor subclasses, `applies` is False.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from fp8.function import apply

__all__ = ["activation", "applies", "silu_glu"]

aten = torch.ops.aten


def _silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``grad`` times the derivative of silu; torch's own kernel has no derivative."""
    gate = torch.sigmoid(x)
    return grad * gate * (1 + x * (1 - gate))


# Name -> (function, its gradient, its gradient as a differentiable function).
_KERNELS: dict[str, tuple[Any, Any, Any]] = {
    "relu": (
        torch.relu,
        lambda g, x: aten.threshold_backward.default(g, x, 0),
        lambda g, x: aten.threshold_backward.default(g, x, 0),
    ),
    "silu": (F.silu, aten.silu_backward.default, _silu_gradient),
    **{
        f"gelu_{approximate}": (
            lambda x, a=approximate: F.gelu(x, approximate=a),
            lambda g, x, a=approximate: aten.gelu_backward.default(g, x, approximate=a),
            lambda g, x, a=approximate: aten.gelu_backward.default(g, x, approximate=a),
        )
        for approximate in ("none", "tanh")
    },
}


def applies(*tensors: Tensor) -> bool:
    """Whether the functions of this file are for these tensors: eager, plain, and of one shape."""
    first = tensors[0]
    return not torch.compiler.is_compiling() and all(
        type(t) in (Tensor, nn.Parameter)
        and t.is_floating_point()
        and t.dtype == first.dtype
        and t.device == first.device
        and t.shape == first.shape
        for t in tensors
    )


class _Activation(Function):
    """``fwd * f(x)`` with ``bwd`` times its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str, fwd: float, bwd: float) -> Tensor:
        result: Tensor = _KERNELS[name][0](x)
        return result.mul_(fwd)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.name, _, ctx.bwd = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        _, kernel, derivative = _KERNELS[ctx.name]
        if torch.is_grad_enabled():
            return derivative(grad, x) * ctx.bwd, None, None, None
        return kernel(grad, x).mul_(ctx.bwd), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (x,) = ctx.saved_tensors
        _, _, derivative = _KERNELS[ctx.name]
        return derivative(tangent, x) * ctx.bwd


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale * a * b`` in one pass."""
    return torch.addcmul(a.new_zeros(()), a, b, value=scale)


class _SiluGlu(Function):
    """``scale * x * activated``, where ``activated`` is silu(gate), and its gradient is gate's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gate: Tensor, activated: Tensor, scale: float) -> Tensor:
        return _scaled_product(x, activated, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, gate, activated = ctx.saved_tensors
        if torch.is_grad_enabled():
            scaled = grad * ctx.scale
            return scaled * F.silu(gate), _silu_gradient(scaled * x, gate), None, None
        dx = _scaled_product(grad, activated, ctx.scale)
        dactivated = _scaled_product(grad, x, ctx.scale)
        return dx, aten.silu_backward.default(dactivated, gate), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dgate: Tensor | None, *_: None) -> Tensor:
        x, gate, activated = ctx.saved_tensors
        result = torch.zeros_like(x)
        if dx is not None:
            result = result + dx * activated
        if dgate is not None:
            result = result + _silu_gradient(dgate * x, gate)
        return result * ctx.scale


def activation(input: Tensor, name: str, fwd: float, bwd: float) -> Tensor:
    """``fwd * f(input)``; ``bwd`` times the gradient. name: a key of the table."""
    return apply(_Activation, input, name, fwd, bwd)


def silu_glu(input: Tensor, gate: Tensor, scale: float) -> Tensor:
    """``scale * input * silu(gate)``."""
    with torch.no_grad():
        activated = F.silu(gate)
    return apply(_SiluGlu, input, gate, activated, scale)
