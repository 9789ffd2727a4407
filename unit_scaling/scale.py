"""Multiplies a tensor by a constant in one direction of autograd only.

Scales are constant numbers, derived from shapes. An op whose scales are equal in both directions is
a plain multiplication and does not need this module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fp8.torch_internals.autograd_functions import apply, same
from fp8.torch_internals.decorators import in_graph

from .common.watched import watched

__all__ = ["scale_bwd", "scale_fwd"]


class _Scale(Function):
    """``y = fwd * x`` with ``dx = bwd * dy``. Supports double backward, forward mode and vmap."""

    # torch.func refuses functions without setup_context, such as the one of 0.3.5.
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, fwd: float, bwd: float) -> Tensor:
        if _is_one(fwd):
            return same(x)
        return x * fwd

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor
    ) -> None:
        ctx.bwd = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not _is_one(ctx.bwd):
            grad = grad * ctx.bwd
        return grad, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent * ctx.bwd


class _Instead(_Scale):
    """``y = value`` with ``d total = bwd * dy``: returns one tensor and differentiates another."""

    @staticmethod
    def forward(total: Tensor, value: Tensor, bwd: float) -> Tensor:  # type: ignore[override]
        return value.clone()


def _is_one(scale: float) -> bool:
    return isinstance(scale, (int, float)) and scale == 1.0


def _check(scale: float) -> None:
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError("a scale is a constant: got a tensor that requires a gradient")


def scale_each(input: Tensor, fwd: float, bwd: float) -> Tensor:
    """Returns ``fwd * input``, with ``bwd`` times the gradient; ``input`` itself for integers and,
    in eager mode, if both factors are 1. A graph does not guard on the factors."""
    if not (input.dtype.is_floating_point or input.dtype.is_complex):
        return input
    return _scale_numbers(input, fwd, bwd)


@partial(in_graph, graph=_Scale.apply)
def _scale_numbers(input: Tensor, fwd: float, bwd: float) -> Tensor:
    if _is_one(fwd) and _is_one(bwd):
        return input
    return apply(_Scale, input, fwd, bwd)


def scale_output(output: Tensor, fwd: float, bwd: float) -> Tensor:
    """Scales the output of an op, but for integers. Scaling the gradient of the output scales the
    gradients of all inputs: those are linear in it."""
    if not (fwd is bwd or fwd == bwd):
        return scale_each(output, fwd, bwd)
    if fwd == 1.0 or not (output.dtype.is_floating_point or output.dtype.is_complex):
        return output
    return output * fwd  # not by other functions: compiled code guards on each


def written_to(out: Tensor | None, output: Tensor) -> Tensor:
    """Returns ``out`` with the values of ``output``, or ``output`` if ``out`` is None. Raises
    TypeError for a dtype that cannot hold them, as torch does."""
    if out is None:
        return output
    if not torch.can_cast(output.dtype, out.dtype):
        raise TypeError(
            f"a result of {output.dtype} cannot be written to a tensor of {out.dtype}"
        )
    return out.copy_(output)


@partial(
    in_graph, graph=lambda value, total, scale: _Instead.apply(total, value, scale)
)
def value_with_gradient(value: Tensor, total: Tensor, scale: float) -> Tensor:
    """Returns ``value``, whose gradient is ``scale`` times the gradient of ``total``, which has its
    shape."""
    return apply(_Instead, total, value, scale)


@watched
def scale_fwd(input: Tensor, scale: float) -> Tensor:
    """Returns ``scale * input``; the gradient is propagated unscaled.

    Args:
        input: any shape, floating point; returned itself if the scale is 1.
        scale: a constant: a number, or a 0-dim tensor.

    Raises:
        ValueError: the scale requires a gradient.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_fwd(x, 3.0).sum().backward(); x.grad.tolist()
    [1.0, 1.0]
    """
    _check(scale)
    return scale_each(input, scale, 1.0)


@watched
def scale_bwd(input: Tensor, scale: float) -> Tensor:
    """Returns ``input``, with its gradient multiplied by ``scale`` in the backward pass.

    Arguments and errors are as in `scale_fwd`.
    """
    _check(scale)
    return scale_each(input, 1.0, scale)
