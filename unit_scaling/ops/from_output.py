"""Activations of compiled graphs that save their scaled output for the backward pass.

The derivatives of exp, sigmoid, tanh and softmax are functions of their value, which torch saves.
Of a scaled output, torch.compile would save the value as well. Here the gradient is computed from
the scaled output, which the next product saves too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fp8.common.compiler import in_graph

from ..scale import scale_both, scale_output

__all__ = ["KERNELS", "OutputKernel", "activation", "applies"]

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


class OutputKernel(NamedTuple):
    """A row of KERNELS: a function of a tensor and its settings, and ``bwd`` times its gradient as
    a function of the output's gradient, the output times ``fwd``, fwd, bwd and the settings."""

    function: Callable[..., Tensor]
    gradient: Callable[..., Tensor]


KERNELS: dict[str, OutputKernel] = {
    "exp": OutputKernel(aten.exp.default, _exp_gradient),
    "sigmoid": OutputKernel(aten.sigmoid.default, _sigmoid_gradient),
    "softmax": OutputKernel(aten.softmax.int, _softmax_gradient),
    "tanh": OutputKernel(aten.tanh.default, _tanh_gradient),
}
"""Name -> how it is computed."""


class _Activation(Function):
    """``fwd * f(x)``, with ``bwd`` times its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
        return KERNELS[name].function(x, *settings) * fwd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.name, *ctx.settings = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        gradient = KERNELS[ctx.name].gradient(grad, kept, *ctx.settings)
        return gradient.to(ctx.dtype), *[None] * (1 + len(ctx.settings))


@in_graph
def _activation(x: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
    return _Activation.apply(x, name, fwd, bwd, *settings)


def applies(name: str) -> bool:
    """Whether `activation` is to compute the function: in a graph."""
    return torch.compiler.is_compiling() and name in KERNELS


def activation(input: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
    """``fwd * f(input)``; ``bwd`` times the gradient. settings: the arguments of f after input.

    An input that requires no gradient, as in `torch.func`, takes torch's own function.
    """
    if not input.requires_grad:
        output = KERNELS[name].function(input, *settings)
        return scale_output(output, fwd, bwd)
    return _activation(input, name, fwd, bwd, *settings)
