"""Activations in compiled graphs, and what they save for the backward pass: output or input.

The derivatives of exp, relu, sigmoid, tanh and softmax are functions of their output, which torch
saves. For a scaled output, the compiler would save another tensor or recompute the output. Here
only the scaled output is saved, which the next product saves as well.

For piecewise derivatives the compiler saves booleans, which its CPU kernels access one by one, in
ten times the time of everything else. Here the gradient compares the output or, in graphs for a
CPU, the input, as in eager mode.

On CPUs, where activations are compute-bound, derivatives use cheaper formulas: the output instead
of an exponential, or the factor merged into constants.
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
    """``fwd`` rounded to the dtype of y: the value of y where the function is 1. The gradient is
    then 0 there and never has the wrong sign.
    """
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
    """For alpha = 1, without an exponential: e^x is the output plus 1."""
    return scale_both(grad * (y.clamp(max=0) + _top(y, fwd)), bwd / fwd)


def _silu_gradient(grad: Tensor, x: Tensor, fwd: float, bwd: float) -> Tensor:
    """The derivative is g (1 + x (1 - g)), g = sigmoid(x); each factor is multiplied by the root of
    bwd. Computed in at least float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, root = x.to(dtype), bwd**0.5
    gate = x.new_full((), root) / (1 + (-x).exp())
    return grad.to(dtype) * gate * (root + x * (root - gate))


def _piecewise(gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps torch's ``gradient(grad, x, *settings)``, which compares x, for a `Kernel`.

    A zero that depends on grad is added to x, so that the compiler does not save booleans.
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
    """A row of KERNELS: a function of a tensor and settings, and its gradient times ``bwd``.

    The gradient is a function of the output's gradient, the output (``fwd`` times the function),
    fwd, bwd and the settings. keeps_input: on CPUs, it takes the input instead of the output.
    settings: the only settings that the gradient supports; None for any.
    """

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
"""Name -> kernel."""


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
    """Returns ``fwd * f(input)``, with ``bwd`` times the gradient. settings: further arguments of
    f.

    Uses torch's own gradient if the input does not require one, for `torch.func`, and for relu and
    silu if a recipe quantizes saved activations, which it does for torch functions.
    """
    from fp8.common.traced import apply

    recipe = active_recipe() if name in ("relu", "silu") else None
    if input.requires_grad and not (recipe and recipe.saved_activations):
        function = "unit_scaling.ops.from_output._activation"
        return apply(function, input, name, fwd, bwd, *settings)
    return scale_output(KERNELS[name].function(input, *settings), fwd, bwd, fresh=False)
