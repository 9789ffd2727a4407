"""Activations of compiled graphs, with what they keep for the backward pass: output or input.

The derivative of exp, relu, sigmoid, tanh and softmax is a function of their value, which torch
saves. Of a scaled value, though, the compiler would save something else as well, or work the value
out again. Here the scaled output is all that is saved, and what the next product saves too.

Where the derivative depends on the side of a kink, the compiler saves bools. Its kernels for CPUs
write and read them one at a time, in ten times the time of all the rest. Here the gradient compares
the output or, in a graph for a CPU, the input, as in eager mode.

Where CPUs wait for arithmetic and not for memory, a derivative is worked out with less of it: from
a value in place of an exponential, or with the factor in the constants of its formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from fp8.common.compiler import in_graph
from fp8.context.active import active_recipe

from ..scale import scale_both, scale_output

__all__ = ["KERNELS", "Kernel", "activation"]

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


def _elu_gradient(grad: Tensor, y: Tensor, fwd: float, bwd: float, alpha: float) -> Tensor:
    """For alpha = 1, with no exponential: e^x is the value and 1."""
    return scale_both(grad * (y.clamp(max=0) + _top(y, fwd)), bwd / fwd)


def _silu_gradient(grad: Tensor, x: Tensor, fwd: float, bwd: float) -> Tensor:
    """The derivative is g (1 + x (1 - g)), g = sigmoid(x), and each of the two has the root of bwd
    for a factor. Computed in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, root = x.to(dtype), bwd**0.5
    gate = x.new_full((), root) / (1 + (-x).exp())
    return grad.to(dtype) * gate * (root + x * (root - gate))


def _piecewise(gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``gradient(grad, x, *settings)`` of torch, which compares x, in the form of a `Kernel`.

    To x is added a zero that the compiler does not know before grad, so that it keeps no bools.
    """

    def scaled(grad: Tensor, x: Tensor, fwd: float, bwd: float, *settings: Any) -> Tensor:
        return scale_both(gradient(grad, x + grad.sign().clamp(0, 0), *settings), bwd)

    return scaled


def _clamp_gradient(grad: Tensor, x: Tensor, low: float | None, high: float | None) -> Tensor:
    grad = grad if low is None else torch.where(x >= low, grad, 0.0)
    return grad if high is None else torch.where(x <= high, grad, 0.0)


def _leaky_relu_gradient(grad: Tensor, x: Tensor, slope: float) -> Tensor:
    return aten.leaky_relu_backward.default(grad, x, slope, False)


def _relu_gradient(grad: Tensor, y: Tensor) -> Tensor:
    return aten.threshold_backward.default(grad, y, 0)


def _relu6_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return aten.hardtanh_backward.default(grad, x, 0, 6)


class Kernel(NamedTuple):
    """A row of KERNELS: a function of a tensor and its settings; and ``bwd`` times its gradient: a
    function of the output's gradient, the output, which is ``fwd`` times the function's value, fwd,
    bwd and the settings. keeps_input: of the input in place of the output, on CPUs. settings: the
    only ones that the gradient is for, None for any."""

    function: Callable[..., Tensor]
    gradient: Callable[..., Tensor]
    keeps_input: bool = False
    settings: tuple[Any, ...] | None = None


def _kinked(function: Callable[..., Tensor], gradient: Callable[..., Tensor]) -> Kernel:
    return Kernel(function, _piecewise(gradient), keeps_input=True)


KERNELS: dict[str, Kernel] = {
    "celu": Kernel(aten.celu.default, _elu_gradient, settings=(1.0,)),
    "clamp": _kinked(aten.clamp.default, _clamp_gradient),
    "elu": Kernel(aten.elu.default, _elu_gradient, settings=(1.0,)),
    "exp": Kernel(aten.exp.default, _exp_gradient),
    "hardshrink": _kinked(aten.hardshrink.default, aten.hardshrink_backward.default),
    "hardsigmoid": _kinked(aten.hardsigmoid.default, aten.hardsigmoid_backward.default),
    "hardtanh": _kinked(aten.hardtanh.default, aten.hardtanh_backward.default),
    "leaky_relu": _kinked(aten.leaky_relu.default, _leaky_relu_gradient),
    "relu": Kernel(torch.relu, _piecewise(_relu_gradient)),
    "relu6": _kinked(aten.relu6.default, _relu6_gradient),
    "sigmoid": Kernel(aten.sigmoid.default, _sigmoid_gradient),
    "silu": Kernel(F.silu, _silu_gradient, keeps_input=True),
    "softmax": Kernel(aten.softmax.int, _softmax_gradient),
    "softshrink": _kinked(aten.softshrink.default, aten.softshrink_backward.default),
    "tanh": Kernel(aten.tanh.default, _tanh_gradient),
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
        ctx.save_for_backward(x if KERNELS[ctx.name].keeps_input else output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        gradient = KERNELS[ctx.name].gradient(grad, kept, *ctx.settings)
        return gradient.to(ctx.dtype), *[None] * (1 + len(ctx.settings))


@in_graph
def _activation(x: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
    kernel = KERNELS[name]
    if (x.is_cpu or not kernel.keeps_input) and kernel.settings in (None, settings):
        return _Activation.apply(x, name, fwd, bwd, *settings)
    return scale_output(kernel.function(x, *settings), fwd, bwd, fresh=False)


def activation(input: Tensor, name: str, fwd: float, bwd: float, *settings: Any) -> Tensor:
    """``fwd * f(input)``; ``bwd`` times the gradient. settings: the arguments of f after input.

    Torch's own gradient for an input that records none, for `torch.func`; and for relu and silu
    where a recipe says what is saved, and sees to torch's functions.
    """
    from fp8.common.traced import apply

    recipe = active_recipe() if name in ("relu", "silu") else None
    if input.requires_grad and not (recipe and recipe.saved_activations):
        function = "unit_scaling.ops.from_output._activation"
        return apply(function, input, name, fwd, bwd, *settings)
    return scale_output(KERNELS[name].function(input, *settings), fwd, bwd, fresh=False)
