"""Activations that apply their scales with the fewest passes over memory, in eager mode.

As a separate multiplication, a scale costs one pass and one tensor in each direction. Here it
multiplies new results in place or is part of a product (``addcmul``). Compiled graphs fuse this
themselves, so `applies` is False for them, and for tensor subclasses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from fp8.common.compiler import apply, eager_only
from fp8.context.active import active_recipe
from fp8.products.activations import KERNELS

__all__ = ["activation", "applies", "silu_glu"]

aten = torch.ops.aten


@eager_only(False)
def applies(*tensors: Tensor) -> bool:
    """Whether the functions of this module support these tensors: eager, plain, and of one shape.

    They save their input unchanged; recipes that quantize it do so for torch functions.
    """
    first, recipe = tensors[0], active_recipe()
    if recipe is not None and recipe.saved_activations:
        return False
    return all(
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
    def forward(x: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
        result = KERNELS[name].function(x, *settings)
        return result.mul_(fwd)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, name, _, ctx.bwd, *ctx.settings = inputs
        ctx.kernel = KERNELS[name]
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        none = [None] * (3 + len(ctx.settings))
        if torch.is_grad_enabled():
            return ctx.kernel.differentiable(grad, x, *ctx.settings) * ctx.bwd, *none
        return ctx.kernel.gradient(grad, x, *ctx.settings).mul_(ctx.bwd), *none

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (x,) = ctx.saved_tensors
        return ctx.kernel.differentiable(tangent, x, *ctx.settings) * ctx.bwd


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale * a * b`` in one pass."""
    return torch.addcmul(a.new_zeros(()), a, b, value=scale)


class _SiluGlu(Function):
    """``scale * x * activated``, where ``activated`` is silu(gate) and its gradient propagates to
    gate.
    """

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
            return (
                scaled * F.silu(gate),
                KERNELS["silu"].differentiable(scaled * x, gate),
                None,
                None,
            )
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
            result = result + KERNELS["silu"].differentiable(dgate * x, gate)
        return result * ctx.scale


def activation(input: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
    """Returns ``fwd * f(input)``, with ``bwd`` times the gradient.

    name: a key of `fp8.products.activations.KERNELS`.
    """
    return apply(_Activation, input, name, fwd, bwd, *settings)


def silu_glu(input: Tensor, gate: Tensor, scale: float) -> Tensor:
    """Returns ``scale * input * silu(gate)``."""
    with torch.no_grad():
        activated = F.silu(gate)
    return apply(_SiluGlu, input, gate, activated, scale)
