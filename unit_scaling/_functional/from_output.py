"""Activations of compiled graphs whose gradient is computed from their scaled output.

The derivative of exp, sigmoid, tanh and softmax is a function of their value, which torch saves.
Of a scaled value, though, the compiler would save something else as well, or work the value out
again. Here the scaled output is all that is saved, and what the next product saves too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fp8.function import in_graph

from ..scale import scale_both

__all__ = ["KERNELS", "activation"]

aten = torch.ops.aten


def _top(y: Tensor, fwd: float) -> float:
    """``fwd`` as a number of the dtype of y: what y is where the function is 1, so that the
    gradient is 0 there, and nowhere of the wrong sign."""
    unit = torch.finfo(y.dtype).eps * 2.0 ** (math.frexp(fwd)[1] - 1)
    return round(fwd / unit) * unit


def _exp_gradient(grad: Tensor, y: Tensor, fwd: float, bwd: float) -> Tensor:
    return scale_both(grad * y, bwd / fwd)


def _sigmoid_gradient(grad: Tensor, y: Tensor, fwd: float, bwd: float) -> Tensor:
    top = _top(y, fwd)
    return grad * (top - y) * y * (bwd / top**2)


def _tanh_gradient(grad: Tensor, y: Tensor, fwd: float, bwd: float) -> Tensor:
    top = _top(y, fwd)
    return grad * ((top - y) * (top + y)) * (bwd / top**2)


def _softmax_gradient(grad: Tensor, y: Tensor, fwd: float, bwd: float, dim: int) -> Tensor:
    mean = (grad * y).sum(dim, keepdim=True) * (1 / fwd)
    return scale_both((grad - mean) * y, bwd / fwd)


#: Name -> (the function, ``bwd`` times its gradient from ``y``, which is ``fwd`` times its value).
KERNELS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "exp": (aten.exp.default, _exp_gradient),
    "sigmoid": (aten.sigmoid.default, _sigmoid_gradient),
    "softmax": (aten.softmax.int, _softmax_gradient),
    "tanh": (aten.tanh.default, _tanh_gradient),
}


@in_graph
class _FromOutput(Function):
    """``fwd * f(x)``, with ``bwd`` times its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
        return KERNELS[name][0](x, *settings) * fwd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.name, *ctx.settings = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        gradient = KERNELS[ctx.name][1](grad, y, *ctx.settings)
        return gradient.to(ctx.dtype), *[None] * (1 + len(ctx.settings))


def activation(input: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
    """``fwd * f(input)``; ``bwd`` times the gradient. settings: the arguments of f after input."""
    from fp8.traced import apply

    return apply("_FromOutput", input, name, fwd, bwd, *settings)
