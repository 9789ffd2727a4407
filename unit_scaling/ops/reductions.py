"""Sums, means and variances over dimensions, and cosine similarity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.table import Scales, row, tie
from .arithmetic import scaled_terms, shares
from .generated import CONSTRAINT, REQUIRED, unary

Dims = int | Sequence[int] | None


def _summed(input: Tensor, dim: Dims) -> int:
    """The number of terms of each sum."""
    if isinstance(dim, int):
        return input.shape[dim] or 1 if input.ndim else 1
    if dim is None or len(dim) == 0:
        return input.numel() or 1
    return math.prod([input.shape[d] for d in dim]) or 1 if input.ndim else 1


def sum_scales(
    input: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """1/sqrt(n) for uncorrelated terms; each receives the gradient of the sum.

    Not scaled over all elements (a loss) or with keepdim (a statistic that is combined with the
    input again).
    """
    if keepdim or dim is None:
        return tie(constraint, output=1.0, input=1.0)
    return tie(constraint, output=_summed(input, dim) ** -0.5, input=1.0)


def mean_scales(
    input: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """sqrt(n) for uncorrelated terms, and n for the gradient, as each receives 1/n of it.

    Not scaled where `sum_scales` does not scale; the gradient of a loss is then that of the sum.
    """
    count = _summed(input, dim)
    if keepdim or dim is None:
        return tie(constraint, output=1.0, input=count if dim is None else 1.0)
    return tie(constraint, output=count**0.5, input=count)


_OVER = {"dim": None, "keepdim": False, "dtype": None, **CONSTRAINT}

sum = unary(
    torch.sum,
    sum_scales,
    """Computes ``s * input.sum(dim)``.

    Not scaled over all dimensions, with ``keepdim``, and for integers.

    Args:
        input: any shape.
        dim: one or several dimensions; None for all.
        keepdim: whether to keep reduced dimensions with size 1.
        dtype: the dtype of the result.
        constraint: see `unit_scaling.constraints`.
    """,
    _OVER,
)
mean = unary(
    torch.mean,
    mean_scales,
    """Computes ``s * input.mean(dim)``; arguments as in `sum`.

    The value is not scaled over all dimensions and with ``keepdim``.
    """,
    _OVER,
)


def cumsum_scales(input: Tensor, dim: int, constraint: str | None = "to_output_scale") -> Scales:
    """Sum k has k terms, (n + 1)/2 on average, in both directions."""
    count = input.shape[dim] if input.ndim else 1
    scale = (2 / (count + 1)) ** 0.5
    return tie(constraint, output=scale, input=scale)


cumsum = unary(
    torch.cumsum,
    cumsum_scales,
    """Computes ``s * input.cumsum(dim)``; integers are not scaled. The factor depends on the
    length.
    """,
    {"dim": REQUIRED, "dtype": None, **CONSTRAINT},
)


# Variances


def var_scales(
    input: Tensor,
    dim: Dims = None,
    correction: int = 1,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """1/RMS for n normal values, (n - c)/sqrt(n^2 - 1), and of the gradient, which is twice the
    distance from the mean over n - c. Not scaled where `sum_scales` does not scale.
    """
    count = _summed(input, dim)
    if keepdim or dim is None or count <= max(1, correction):
        return tie(constraint, output=1.0, input=1.0)
    free = count - correction
    gradient = free / 2 * (count / (count - 1)) ** 0.5
    return tie(constraint, output=free * (count**2 - 1) ** -0.5, input=gradient)


def std_scales(
    input: Tensor,
    dim: Dims = None,
    correction: int = 1,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """1/RMS for n normal values, sqrt((n - c)/(n - 1)), and sqrt(n (n - c)) for the gradient.

    Not scaled where `sum_scales` does not scale.
    """
    count = _summed(input, dim)
    if keepdim or dim is None or count <= max(1, correction):
        return tie(constraint, output=1.0, input=1.0)
    free = count - correction
    return tie(constraint, output=(free / (count - 1)) ** 0.5, input=(count * free) ** 0.5)


_SPREAD = {"dim": None, "correction": 1, "keepdim": False, **CONSTRAINT}

var = unary(
    torch.var,
    var_scales,
    """Computes ``s * torch.var(input, dim)``.

    Not scaled over all dimensions and with ``keepdim``.

    Args:
        input: any shape, floating point.
        dim: one or several dimensions; None for all.
        correction: subtracted from the number of values in the divisor.
        keepdim: whether to keep reduced dimensions with size 1.
        constraint: see `unit_scaling.constraints`.
    """,
    _SPREAD,
)
std = unary(
    torch.std,
    std_scales,
    "Computes ``s * torch.std(input, dim)``; arguments as in `var`. The gradient at 0 is NaN.",
    _SPREAD,
)


# Cosine similarity


def cosine_similarity_scales(
    x1: Tensor, x2: Tensor, dim: int = 1, constraint: str | None = "to_output_scale"
) -> Scales:
    """sqrt(n) for uncorrelated normal vectors of n elements.

    Elements of the gradient of x1 have RMS sqrt((n - 1)/(n - 2))/n; a broadcast vector sums the
    gradients of its copies.
    """
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    width = shape[dim] if shape else 1
    gradient = width * (max(1, width - 2) / max(1, width - 1)) ** 0.5
    first, second = shares(x1, x2)
    return tie(constraint, output=(width or 1) ** 0.5, x1=gradient * first, x2=gradient * second)


@row(cosine_similarity_scales, replaces=(F.cosine_similarity, torch.cosine_similarity))
def cosine_similarity(
    x1: Tensor,
    x2: Tensor,
    dim: int = 1,
    eps: float = 1e-8,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Computes ``s * cosine_similarity(x1, x2, dim)``, which has RMS 1 and is at most sqrt(n).

    Args:
        x1: floating point, broadcastable with ``x2``.
        x2: floating point.
        dim: the dimension of the vectors, of size n; it is removed.
        eps: the smallest norm to divide by; zero vectors give 0, as in torch.
        constraint: see `unit_scaling.constraints`.
    """
    s = cosine_similarity_scales(x1, x2, dim, constraint)
    return scaled_terms(lambda a, b: F.cosine_similarity(a, b, dim, eps), {"x1": x1, "x2": x2}, s)
