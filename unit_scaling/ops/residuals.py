"""Residual connections: a weighted sum whose branch gradient is scaled where the branch starts."""

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
    """``a * branch + b * skip``; b is above zero."""
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
    """``branch_weight * branch + skip_weight * skip``; both gradients are the output's own."""

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
    """``(residual, skip)``, both equal to input: the start of a residual branch.

    tau: the weight of the branch against the skip connection, at least 0; the same number as in
    `residual_add`, which ends the branch. Inside the branch gradients are those of a branch of
    weight 1, so they have RMS 1 too; here they are multiplied by the branch's weight.
    Raises ValueError for a negative tau.
    """
    branch, skip = apply(_Split, input, *_weights(tau))
    return branch, skip


@watched
def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """``(tau * residual + skip) / sqrt(1 + tau**2)``, with gradients passed on unscaled.

    residual, skip: shapes that broadcast together. See `residual_split`.
    """
    return apply(_Add, residual, skip, *_weights(tau))


def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """``(tau * fn(input) + input) / sqrt(1 + tau**2)``, unit-scaled in both directions.

    >>> residual_apply(torch.relu, torch.tensor([-2.0, 2.0]), tau=1.0)
    tensor([-1.4142,  2.8284])
    """
    branch, skip = residual_split(input, tau)
    return residual_add(fn(branch), skip, tau)
