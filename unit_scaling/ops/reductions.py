"""Sums, means and variances over dimensions, and the cosine between vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.one_call import one_call
from ..rules.table import Scales, row, tie
from ..scale import scale_each, scale_output

__all__ = ["cosine_similarity", "cumsum", "mean", "std", "sum", "var"]

Dims = int | Sequence[int] | None


def _summed(input: Tensor, dim: Dims) -> int:
    """How many numbers each sum is of."""
    if isinstance(dim, int):
        return input.shape[dim] or 1 if input.dim() else 1
    if dim is None or len(dim) == 0:
        return input.numel() or 1
    return math.prod([input.shape[d] for d in dim]) or 1 if input.dim() else 1


def _is_value(input: Tensor, dim: Dims, keepdim: bool) -> bool:
    """Whether a sum or mean is a value to be kept: of all numbers (a loss), or a statistic."""
    return keepdim or dim is None or not (input.is_floating_point() or input.is_complex())


def sum_scales(
    input: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """1/sqrt(n) for independent numbers; each gets the gradient of the sum.

    The value is kept where it is of all numbers, which makes a loss, or where keepdim is set,
    which makes a statistic that meets the input again.
    """
    if _is_value(input, dim, keepdim):
        return tie(constraint, output=1.0, input=1.0)
    return tie(constraint, output=_summed(input, dim) ** -0.5, input=1.0)


def mean_scales(
    input: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """sqrt(n) for independent numbers, and n for the gradient, of which each gets 1/n.

    The value is kept where `sum_scales` keeps it; the gradient of a loss is then that of the sum.
    """
    count = _summed(input, dim)
    if _is_value(input, dim, keepdim):
        return tie(constraint, output=1.0, input=count if dim is None else 1.0)
    return tie(constraint, output=count**0.5, input=count)


def _torch_reduce(
    input: Tensor, dim: Dims = None, keepdim: bool = False, **named: Any
) -> dict[str, Any]:
    given = {"axis": dim, **named}
    return {"input": input, "dim": given.pop("axis"), "keepdim": keepdim, **given}


@row(sum_scales, adapters={torch.sum: _torch_reduce, torch.Tensor.sum: _torch_reduce})
@one_call
def sum(
    input: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """``s * input.sum(dim)``; not scaled where the rule keeps the value, and for integers.

    input: any shape. dim: one or several dimensions, None for all. dtype: of the result.
    """
    s = sum_scales(input, dim, keepdim, constraint)
    output = torch.sum(input, dim, keepdim, dtype=dtype)  # type: ignore[arg-type]
    return scale_output(output, s["output"], s["input"], fresh=True)


@row(mean_scales, adapters={torch.mean: _torch_reduce, torch.Tensor.mean: _torch_reduce})
@one_call
def mean(
    input: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """``s * input.mean(dim)``; not scaled where the rule keeps the value.

    Arguments as in `sum`.
    """
    s = mean_scales(input, dim, keepdim, constraint)
    output = torch.mean(input, dim, keepdim, dtype=dtype)  # type: ignore[arg-type]
    return scale_output(output, s["output"], s["input"], fresh=True)


def cumsum_scales(input: Tensor, dim: int, constraint: str | None = "to_output_scale") -> Scales:
    """The k-th sum is of k numbers: (n + 1)/2 on average, in both directions."""
    if not (input.is_floating_point() or input.is_complex()):
        return {"output": 1.0, "input": 1.0}
    count = input.shape[dim] if input.dim() else 1
    scale = (2 / (count + 1)) ** 0.5
    return tie(constraint, output=scale, input=scale)


@row(cumsum_scales, replaces=(torch.cumsum, torch.Tensor.cumsum))
@one_call
def cumsum(
    input: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """``s * input.cumsum(dim)``; of integers, not scaled. The factor depends on the length."""
    s = cumsum_scales(input, dim, constraint)
    output = torch.cumsum(input, dim, dtype=dtype)
    return scale_output(output, s["output"], s["input"], fresh=True)


# Variances


def _numbers(input: Tensor, dim: Dims, correction: int, keepdim: bool) -> tuple[int, int]:
    """(how many numbers each variance is of, what it divides by); (0, 0) for a value to be kept."""
    count = _summed(input, dim)
    if _is_value(input, dim, keepdim) or count <= max(1, correction):
        return 0, 0
    return count, count - correction


def var_scales(
    input: Tensor,
    dim: Dims = None,
    correction: int = 1,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """Of n normal numbers, 1/RMS: (n - c)/sqrt(n^2 - 1); of the gradient, twice the distance from
    the mean over n - c. The value is kept where `sum_scales` keeps it.
    """
    count, free = _numbers(input, dim, correction, keepdim)
    if not count:
        return tie(constraint, output=1.0, input=1.0)
    gradient = free / 2 * (count / (count - 1)) ** 0.5
    return tie(constraint, output=free * (count**2 - 1) ** -0.5, input=gradient)


def _torch_var(input: Tensor, *args: Any, **named: Any) -> dict[str, Any]:
    names = ("unbiased",) if args and isinstance(args[0], bool) else ("dim", "unbiased", "keepdim")
    given = {**dict(zip(names, args, strict=False)), **named}
    if "unbiased" in given:
        given["correction"] = int(given.pop("unbiased"))
    return {"input": input, **given}


@row(var_scales, adapters={torch.var: _torch_var, torch.Tensor.var: _torch_var})
@one_call
def var(
    input: Tensor,
    dim: Dims = None,
    correction: int = 1,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """``s * torch.var(input, dim)``; not scaled where the rule keeps the value.

    input: any shape, floating point. dim: one or several dimensions, None for all. correction:
    what is taken off the number of values before it divides.
    """
    s = var_scales(input, dim, correction, keepdim, constraint)
    output = torch.var(input, dim, correction=correction, keepdim=keepdim)  # type: ignore[arg-type]
    return scale_output(output, s["output"], s["input"], fresh=True)


def std_scales(
    input: Tensor,
    dim: Dims = None,
    correction: int = 1,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """Of n normal numbers, 1/RMS: sqrt((n - c)/(n - 1)); sqrt(n (n - c)) for the gradient.

    The value is kept where `sum_scales` keeps it.
    """
    count, free = _numbers(input, dim, correction, keepdim)
    if not count:
        return tie(constraint, output=1.0, input=1.0)
    return tie(constraint, output=(free / (count - 1)) ** 0.5, input=(count * free) ** 0.5)


@row(std_scales, adapters={torch.std: _torch_var, torch.Tensor.std: _torch_var})
@one_call
def std(
    input: Tensor,
    dim: Dims = None,
    correction: int = 1,
    keepdim: bool = False,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """``s * torch.std(input, dim)``; arguments as in `var`. As in torch, 0 has the gradient NaN."""
    s = std_scales(input, dim, correction, keepdim, constraint)
    output = torch.std(input, dim, correction=correction, keepdim=keepdim)  # type: ignore[arg-type]
    return scale_output(output, s["output"], s["input"], fresh=False)


# Cosines


def cosine_similarity_scales(
    x1: Tensor, x2: Tensor, dim: int = 1, constraint: str | None = "to_output_scale"
) -> Scales:
    """sqrt(n) for independent normal vectors of n numbers; the gradient of each number of x1 is of
    RMS sqrt((n - 1)/(n - 2))/n, and a broadcast vector collects those of its copies.
    """
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    width, size = shape[dim] if shape else 1, math.prod(shape)
    gradient = width * (max(1, width - 2) / max(1, width - 1)) ** 0.5
    shares = [((x.numel() or 1) / (size or 1)) ** 0.5 for x in (x1, x2)]
    scales = {name: gradient * share for name, share in zip(("x1", "x2"), shares, strict=True)}
    return tie(constraint, output=(width or 1) ** 0.5, **scales)


@row(cosine_similarity_scales, replaces=(F.cosine_similarity, torch.cosine_similarity))
@one_call
def cosine_similarity(
    x1: Tensor,
    x2: Tensor,
    dim: int = 1,
    eps: float = 1e-8,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """``s * cosine_similarity(x1, x2, dim)``, of RMS 1: at most sqrt(n) for vectors of n numbers.

    x1, x2: of shapes that broadcast together, floating point. dim: that of the vectors, which goes.
    eps: the smallest norm to divide by; as torch, a zero vector gives 0.
    """
    s = cosine_similarity_scales(x1, x2, dim, constraint)
    if s["x1"] == s["x2"]:
        output = F.cosine_similarity(x1, x2, dim, eps)
        return scale_output(output, s["output"], s["x1"], fresh=True)
    x1, x2 = scale_each(x1, 1.0, s["x1"]), scale_each(x2, 1.0, s["x2"])
    output = F.cosine_similarity(x1, x2, dim, eps)
    return scale_each(output, s["output"], 1.0)
