"""Arithmetic between tensors, and sums over dimensions.

What needs no factor has no row: cat and stack, which put tensors of one scale side by side,
reshaping and indexing, neg, abs, clamp. A product with a number or of integers is left as it is:
whoever multiplies by a number here means it, as a temperature. A quotient has no rule: 1/x of a
normal x has no finite second moment.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import Scales, row, tie
from ..scale import scale_bwd, scale_each, scale_output
from .activations import add, add_scales

__all__ = ["addcmul", "cumsum", "lerp", "mean", "mul", "sub", "sum"]

Number = Tensor | float
Dims = int | Sequence[int] | None


def _copies(size: int, tensor: Tensor) -> float:
    """How many places of a result of ``size`` numbers each number of a tensor goes to."""
    return size / (tensor.numel() or 1) or 1.0


# Differences


def sub_scales(
    input: Number,
    other: Number,
    constraint: str | None = "to_output_scale",
    alpha: float = 1,
) -> Scales:
    """As `add_scales`."""
    return add_scales(input, other, constraint, alpha)


def _torch_sub(
    input: Number, other: Number, *, alpha: float = 1, out: Tensor | None = None
) -> dict[str, Any]:
    return {"input": input, "other": other, "alpha": alpha, "out": out}


def _torch_sub_(input: Tensor, other: Number, *, alpha: float = 1) -> dict[str, Any]:
    return {"input": input, "other": other, "alpha": alpha, "out": input}


def _torch_reversed_sub(input: Tensor, other: Number) -> dict[str, Any]:
    return {"input": other, "other": input}


@row(
    sub_scales,
    adapters={
        torch.sub: _torch_sub,
        torch.subtract: _torch_sub,
        torch.Tensor.sub: _torch_sub,
        torch.Tensor.subtract: _torch_sub,
        torch.Tensor.__sub__: _torch_sub,
        operator.sub: _torch_sub,
        torch.Tensor.__rsub__: _torch_reversed_sub,
        torch.rsub: _torch_reversed_sub,
        torch.Tensor.sub_: _torch_sub_,
        torch.Tensor.__isub__: _torch_sub_,
        operator.isub: _torch_sub_,
    },
)
def sub(
    input: Number,
    other: Number,
    constraint: str | None = "to_output_scale",
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """``s * (input - alpha * other)``, as `add`: with a number, or of integers, not scaled."""
    return add(input, other, constraint, -alpha, out)


# Products


def mul_scales(input: Number, other: Number, constraint: str | None = "to_output_scale") -> Scales:
    """Independent factors of RMS 1 have a product of RMS 1; a broadcast one collects gradients.

    A product with a number, or of integers, is left alone.
    """
    scales = {"output": 1.0, "input": 1.0, "other": 1.0}
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return scales
    if not (input.is_floating_point() and other.is_floating_point()):
        return scales
    size = math.prod(torch.broadcast_shapes(input.shape, other.shape))
    grads = [float(_copies(size, t) ** -0.5) for t in (input, other)]
    return tie(constraint, output=1.0, input=grads[0], other=grads[1])


def _torch_mul(input: Number, other: Number, *, out: Tensor | None = None) -> dict[str, Any]:
    return {"input": input, "other": other, "out": out}


def _torch_mul_(input: Tensor, other: Number) -> dict[str, Any]:
    return {"input": input.clone(), "other": other, "out": input}  # autograd saves the factors


@row(
    mul_scales,
    adapters={
        torch.mul: _torch_mul,
        torch.multiply: _torch_mul,
        torch.Tensor.mul: _torch_mul,
        torch.Tensor.multiply: _torch_mul,
        torch.Tensor.__mul__: _torch_mul,
        torch.Tensor.__rmul__: _torch_mul,
        operator.mul: _torch_mul,
        torch.Tensor.mul_: _torch_mul_,
        torch.Tensor.__imul__: _torch_mul_,
        operator.imul: _torch_mul_,
    },
)
def mul(
    input: Number,
    other: Number,
    constraint: str | None = "to_output_scale",
    out: Tensor | None = None,
) -> Tensor:
    """``input * other``, whose RMS is 1 already; the factors are those of broadcast gradients.

    input, other: tensors of shapes that broadcast together, or one of them a number.
    out: a tensor to copy the result into, returned in its place; it may carry gradients.
    """
    s = mul_scales(input, other, constraint)
    if s["input"] != 1.0:
        input = scale_bwd(input, s["input"])  # type: ignore[arg-type]
    if s["other"] != 1.0:
        other = scale_bwd(other, s["other"])  # type: ignore[arg-type]
    output = torch.mul(input, other)
    return output if out is None else out.copy_(output)


def addcmul_scales(
    input: Tensor,
    tensor1: Tensor,
    tensor2: Tensor,
    value: float = 1,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """Independent terms: 1/sqrt(1 + value**2); a broadcast operand collects gradients."""
    shapes = (input.shape, tensor1.shape, tensor2.shape)
    size = math.prod(torch.broadcast_shapes(*shapes))
    weights = (1.0, abs(value) or 1.0, abs(value) or 1.0)
    grads = [
        float(_copies(size, t) ** -0.5 / w)
        for t, w in zip((input, tensor1, tensor2), weights, strict=True)
    ]
    names = ("input", "tensor1", "tensor2")
    return tie(
        constraint, output=(1 + value * value) ** -0.5, **dict(zip(names, grads, strict=True))
    )


@row(addcmul_scales, replaces=(torch.addcmul, torch.Tensor.addcmul))
def addcmul(
    input: Tensor,
    tensor1: Tensor,
    tensor2: Tensor,
    value: float = 1,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """``s * (input + value * tensor1 * tensor2)``, of shapes that broadcast together."""
    s = addcmul_scales(input, tensor1, tensor2, value, constraint)
    operands = [
        scale_bwd(t, s[name])
        for name, t in (("input", input), ("tensor1", tensor1), ("tensor2", tensor2))
    ]
    return scale_each(torch.addcmul(*operands, value=value), s["output"], 1.0)


def lerp_scales(
    input: Tensor,
    end: Tensor,
    weight: Number,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """Independent terms of weights 1 - w and w; for a tensor w, their RMS sqrt(2) and 1."""
    a, b = (math.sqrt(2), 1.0) if isinstance(weight, Tensor) else (abs(1 - weight), abs(weight))
    operands = {"input": (input, a), "end": (end, b)}
    if isinstance(weight, Tensor):
        operands["weight"] = (weight, math.sqrt(2))
    size = math.prod(torch.broadcast_shapes(*[t.shape for t, _ in operands.values()]))
    grads = {
        name: float(_copies(size, t) ** -0.5 / (w or 1.0)) for name, (t, w) in operands.items()
    }
    return tie(constraint, output=(a * a + b * b) ** -0.5, **grads)


@row(lerp_scales, replaces=(torch.lerp, torch.Tensor.lerp))
def lerp(
    input: Tensor, end: Tensor, weight: Number, constraint: str | None = "to_output_scale"
) -> Tensor:
    """``s * (input + weight * (end - input))``, of shapes that broadcast together.

    weight: a number, or a tensor, which is then a standard normal for the rule.
    """
    s = lerp_scales(input, end, weight, constraint)
    if isinstance(weight, Tensor):
        weight = scale_bwd(weight, s["weight"])
    output = torch.lerp(scale_bwd(input, s["input"]), scale_bwd(end, s["end"]), weight)
    return scale_each(output, s["output"], 1.0)


# Sums over dimensions


def _summed(input: Tensor, dim: Dims) -> int:
    """How many numbers each sum is of."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return input.numel() or 1
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return math.prod([input.shape[d] for d in dims]) or 1 if input.dim() else 1


def _is_value(input: Tensor, dim: Dims, keepdim: bool) -> bool:
    """Whether a sum or mean is a value to be kept: of all numbers (a loss), or a statistic."""
    return keepdim or dim is None or not input.is_floating_point()


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
        return tie(constraint, output=1.0, input=float(count) if dim is None else 1.0)
    return tie(constraint, output=count**0.5, input=float(count))


def _torch_reduce(
    input: Tensor, dim: Dims = None, keepdim: bool = False, **named: Any
) -> dict[str, Any]:
    given = {"axis": dim, **named}
    return {"input": input, "dim": given.pop("axis"), "keepdim": keepdim, **given}


def _settings(dtype: torch.dtype | None) -> dict[str, Any]:
    return {} if dtype is None else {"dtype": dtype}


@row(sum_scales, adapters={torch.sum: _torch_reduce, torch.Tensor.sum: _torch_reduce})
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
    output = torch.sum(input, dim, keepdim, **_settings(dtype))  # type: ignore[arg-type]
    return scale_output(output, s["output"], s["input"], fresh=True)


@row(mean_scales, adapters={torch.mean: _torch_reduce, torch.Tensor.mean: _torch_reduce})
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
    output = torch.mean(input, dim, keepdim, **_settings(dtype))  # type: ignore[arg-type]
    return scale_output(output, s["output"], s["input"], fresh=True)


def cumsum_scales(input: Tensor, dim: int, constraint: str | None = "to_output_scale") -> Scales:
    """The k-th sum is of k numbers: (n + 1)/2 on average, in both directions."""
    if not input.is_floating_point():
        return {"output": 1.0, "input": 1.0}
    count = input.shape[dim] if input.dim() else 1
    scale = (2 / (count + 1)) ** 0.5
    return tie(constraint, output=scale, input=scale)


@row(cumsum_scales, replaces=(torch.cumsum, torch.Tensor.cumsum))
def cumsum(
    input: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """``s * input.cumsum(dim)``; of integers, not scaled. The factor depends on the length."""
    s = cumsum_scales(input, dim, constraint)
    output = torch.cumsum(input, dim, **_settings(dtype))
    return scale_output(output, s["output"], s["input"], fresh=True)
