"""Residual connections: a weighted sum whose branch gradient is scaled at the start of the
branch."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ..common.watched import watched
from ..scale import scale_each


def _weights(tau: float) -> tuple[float, float]:
    """The weights of branch and skip connection: their ratio is tau, their squares sum to 1."""
    if not tau >= 0:
        raise ValueError(f"tau, the weight of a branch, is at least 0, got {tau!r}")
    norm = math.sqrt(1 + tau**2)
    return tau / norm, 1 / norm


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
    branch, skip = _weights(tau)
    return scale_each(input, 1.0, branch), scale_each(input, 1.0, skip)


@watched
def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """Computes ``(tau * residual + skip) / sqrt(1 + tau**2)``; gradients are propagated unscaled.

    Args:
        residual: the output of the branch, broadcastable with ``skip``.
        skip: the skip connection; see `residual_split`.
        tau: as in `residual_split`.
    """
    a, b = _weights(tau)
    return scale_each(residual, a, 1.0) + scale_each(skip, b, 1.0)


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
