"""Residual connections: a weighted sum whose branch gradient is scaled at the start of the
branch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fp8.common.compiler import apply, own

from ..common.watched import watched

__all__ = ["residual_add", "residual_apply", "residual_split"]


def _weights(tau: float) -> tuple[float, float]:
    """The weights of branch and skip connection: their ratio is tau, their squares sum to 1."""
    if not tau >= 0:
        raise ValueError(f"tau, the weight of a branch, is at least 0, got {tau!r}")
    norm = math.sqrt(1 + tau**2)
    return tau / norm, 1 / norm


def _weighted(branch: Tensor, skip: Tensor, a: float, b: float) -> Tensor:
    """``a * branch + b * skip``, for b above zero."""
    return torch.add(skip, branch, alpha=a / b).mul_(b)


class _Split(Function):
    """Two views of x; ``dx`` is the weighted sum of their gradients, in one pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, branch: float, skip: float) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, ctx.branch, ctx.skip = inputs

    @staticmethod
    def backward(ctx: Any, branch: Tensor, skip: Tensor) -> tuple[Tensor, None, None]:
        return _weighted(branch, skip, ctx.branch, ctx.skip), None, None


class _Add(Function):
    """``a * branch + b * skip``; both gradients equal the output's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(branch: Tensor, skip: Tensor, a: float, b: float) -> Tensor:
        return own(_weighted(branch, skip, a, b))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shapes = inputs[0].shape, inputs[1].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        branch, skip = ctx.shapes
        return grad.sum_to_size(branch), grad.sum_to_size(skip), None, None


@watched
def residual_split(input: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """Starts a residual branch: returns ``(residual, skip)``, both equal to ``input``.

    Gradients inside the branch are those of a branch of weight 1, so they have RMS 1; here they are
    multiplied by the branch's weight.

    Args:
        input: any shape, floating point.
        tau: the weight of the branch relative to the skip connection, at least 0, and the same as
            in `residual_add`, which ends the branch.

    Raises:
        ValueError: tau is negative.
    """
    branch, skip = apply(_Split, input, *_weights(tau))
    return branch, skip


@watched
def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """Computes ``(tau * residual + skip) / sqrt(1 + tau**2)``; gradients are propagated unscaled.

    Args:
        residual: the output of the branch, broadcastable with ``skip``.
        skip: the skip connection; see `residual_split`.
        tau: as in `residual_split`.
    """
    return apply(_Add, residual, skip, *_weights(tau))


def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """Computes ``(tau * fn(input) + input) / sqrt(1 + tau**2)``, unit-scaled in both directions.

    Args:
        fn: the residual branch.
        input: any shape, floating point.
        tau: as in `residual_split`.

    >>> residual_apply(torch.relu, torch.tensor([-2.0, 2.0]), tau=1.0)
    tensor([-1.4142,  2.8284])
    """
    branch, skip = residual_split(input, tau)
    return residual_add(fn(branch), skip, tau)
