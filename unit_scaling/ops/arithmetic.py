"""Arithmetic between tensors, of which some may be broadcast, concatenation, and residual sums.

Operations with a number, or of integers, are not scaled: an explicit number, such as a temperature,
is intentional.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..common.watched import watched
from ..rules.table import Scales, row, tie
from ..scale import scale_each, scale_output, written_to

Number = Tensor | float

# Broadcast operands


def shares(*operands: Tensor) -> list[float]:
    """For each operand, 1/sqrt of the number of elements of the result that read one of its."""
    size = math.prod(torch.broadcast_shapes(*[t.shape for t in operands])) or 1
    return [float(((t.numel() or 1) / size) ** 0.5) for t in operands]


def scaled_terms(fn: Callable[..., Tensor], operands: dict[str, Tensor], s: Scales) -> Tensor:
    """``fn(*operands)`` with the factors of ``s``; one pass if those of the operands are equal."""
    factors = [s[name] for name in operands]
    if all(factor == factors[0] for factor in factors):
        return scale_output(fn(*operands.values()), s["output"], factors[0])
    terms = [scale_each(t, 1.0, s[name]) for name, t in operands.items()]
    return scale_each(fn(*terms), s["output"], 1.0)


def _broadcast(operands: dict[str, Tensor], weights: Sequence[float]) -> Scales:
    """The factors of the gradients of weighted operands, of which some are broadcast."""
    factors = zip(operands, shares(*operands.values()), weights, strict=True)
    return {name: share / (weight or 1.0) for name, share, weight in factors}


# Sums and differences


def add_scales(
    input: Number,
    other: Number,
    constraint: str | None = "to_output_scale",
    alpha: float = 1,
) -> Scales:
    """Uncorrelated terms: 1/sqrt(1 + alpha**2); a broadcast term sums the gradients of its copies.

    Sums with a number, sums of integers, and tensors added to a one-element tensor (a number with a
    gradient) are not scaled.
    """
    if not (_is_float(input) and _is_float(other)):
        return {"output": 1.0, "input": 1.0, "other": 1.0}
    grads, number = {"input": 1.0, "other": 1 / (abs(alpha) or 1.0)}, False
    if input.shape != other.shape:
        grads = _broadcast({"input": input, "other": other}, (1.0, abs(alpha)))
        number = max(input.numel(), other.numel()) > 1 == min(input.numel(), other.numel())
    return tie(constraint, output=1.0 if number else (1 + alpha * alpha) ** -0.5, **grads)


def _is_float(value: Number) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def _spellings(names: str, symbol: str) -> list[Callable[..., Any]]:
    """Every spelling of a binary operation, by torch's names and Python's symbol."""
    spelled = [(space, n + mark) for mark in ("", "_") for n in names.split() for space in _SPACES]
    spelled += [(Tensor, f"__{mark}{symbol}__") for mark in ("", "i")]
    spelled += [(operator, mark + symbol) for mark in ("", "i")]
    return [getattr(space, name) for space, name in spelled if hasattr(space, name)]


_SPACES = (torch, Tensor)


@row(add_scales, replaces=[*_spellings("add", "add"), Tensor.__radd__])
def add(
    input: Number,
    other: Number,
    constraint: str | None = "to_output_scale",
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``s * (input + alpha * other)``; sums with a number or of integers are not scaled.

    Args:
        input: a tensor or a number; one-element tensors count as numbers.
        other: a tensor broadcastable with ``input``, or a number.
        constraint: see `unit_scaling.constraints`.
        alpha: the factor of ``other``.
        out: a tensor that the result is copied into and that is returned; may require gradients.
    """
    s = add_scales(input, other, constraint, alpha)
    operands: dict[str, Any] = {"input": input, "other": other}  # numbers have factors of 1
    return written_to(out, scaled_terms(partial(torch.add, alpha=alpha), operands, s))


@row(add_scales, replaces=[*_spellings("sub subtract", "sub"), Tensor.__rsub__, torch.rsub])
def sub(
    input: Number,
    other: Number,
    constraint: str | None = "to_output_scale",
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``s * (input - alpha * other)``; arguments are as in `add`."""
    return add(input, other, constraint, -alpha, out)


# Products


def mul_scales(input: Number, other: Number, constraint: str | None = "to_output_scale") -> Scales:
    """The product of uncorrelated factors of RMS 1 has RMS 1; a broadcast factor sums gradients.

    Products with a number or of integers are not scaled.
    """
    scales = {"output": 1.0, "input": 1.0, "other": 1.0}
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return scales
    if not (input.dtype.is_floating_point and other.dtype.is_floating_point):
        return scales
    if input.shape != other.shape:
        scales |= _broadcast({"input": input, "other": other}, (1.0, 1.0))
    return tie(constraint, **scales)


@row(mul_scales, replaces=[*_spellings("mul multiply", "mul"), Tensor.__rmul__])
def mul(
    input: Number,
    other: Number,
    constraint: str | None = "to_output_scale",
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``input * other``, which has RMS 1; gradients of broadcast operands are scaled.

    Arguments are as in `add`.
    """
    operands: dict[str, Any] = {"input": input, "other": other}  # numbers have factors of 1
    return written_to(out, scaled_terms(torch.mul, operands, mul_scales(input, other, constraint)))


def div_scales(input: Tensor, other: Number, constraint: str | None = "to_output_scale") -> Scales:
    """As `mul_scales`, for a divisor of magnitude about 1, such as norms and averages.

    The inverse of a standard normal variable has no finite second moment, and therefore no factor.
    """
    return mul_scales(input, other, constraint)


@row(div_scales, replaces=_spellings("div divide true_divide", "truediv"))
def div(
    input: Tensor,
    other: Number,
    constraint: str | None = "to_output_scale",
    rounding_mode: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``input / other``, for a divisor of magnitude about 1.

    Division by 0 gives Inf or NaN, as in torch. ``rounding_mode`` is torch's, other arguments are
    as in `add`.
    """
    operands: dict[str, Any] = {"input": input, "other": other}  # numbers have factors of 1
    divide = partial(torch.div, rounding_mode=rounding_mode)
    return written_to(out, scaled_terms(divide, operands, div_scales(input, other, constraint)))


def addcmul_scales(
    input: Tensor,
    tensor1: Tensor,
    tensor2: Tensor,
    value: float = 1,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """Uncorrelated terms: 1/sqrt(1 + value**2); a broadcast operand sums gradients."""
    operands = {"input": input, "tensor1": tensor1, "tensor2": tensor2}
    grads = _broadcast(operands, (1.0, abs(value), abs(value)))
    return tie(constraint, output=(1 + value * value) ** -0.5, **grads)


@row(addcmul_scales, replaces=(torch.addcmul, torch.Tensor.addcmul))
def addcmul(
    input: Tensor,
    tensor1: Tensor,
    tensor2: Tensor,
    value: float = 1,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Computes ``s * (input + value * tensor1 * tensor2)``; the shapes must be broadcastable."""
    s = addcmul_scales(input, tensor1, tensor2, value, constraint)
    operands = {"input": input, "tensor1": tensor1, "tensor2": tensor2}
    return scaled_terms(partial(torch.addcmul, value=value), operands, s)


def lerp_scales(
    input: Tensor,
    end: Tensor,
    weight: Number,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """Uncorrelated terms of weights 1 - w and w; for a tensor w, of RMS sqrt(2) and 1."""
    a, b = (math.sqrt(2), 1.0) if isinstance(weight, Tensor) else (abs(1 - weight), abs(weight))
    operands = {"input": input, "end": end}
    if isinstance(weight, Tensor):
        operands["weight"] = weight
    grads = _broadcast(operands, [a, b, math.sqrt(2)][: len(operands)])
    return tie(constraint, output=(a * a + b * b) ** -0.5, **grads)


@row(lerp_scales, replaces=(torch.lerp, torch.Tensor.lerp))
def lerp(
    input: Tensor, end: Tensor, weight: Number, constraint: str | None = "to_output_scale"
) -> Tensor:
    """Computes ``s * (input + weight * (end - input))``; the shapes must be broadcastable.

    weight: a number, or a tensor, which the rule assumes to be standard normal.
    """
    s = lerp_scales(input, end, weight, constraint)
    operands = {"input": input, "end": end}
    if isinstance(weight, Tensor):
        return scaled_terms(torch.lerp, {**operands, "weight": weight}, s)
    return scaled_terms(partial(torch.lerp, weight=weight), operands, s)


# Concatenation


def cat_scales() -> Scales:
    """Concatenation keeps the scale of its tensors and of their gradients."""
    return {"output": 1.0, "tensors": 1.0}


@row(cat_scales, replaces=(torch.cat, torch.concat, torch.concatenate))
def cat(tensors: Sequence[Tensor], dim: int = 0, out: Tensor | None = None) -> Tensor:
    """`torch.cat`, with its arguments; no factor is needed."""
    return torch.cat(tensors, dim, out=out)  # type: ignore[arg-type]


@row(cat_scales, replaces=(torch.stack,))
def stack(tensors: Sequence[Tensor], dim: int = 0, out: Tensor | None = None) -> Tensor:
    """`torch.stack`, with its arguments; no factor is needed."""
    return torch.stack(tensors, dim, out=out)  # type: ignore[arg-type]


# Residual connections: a weighted sum whose branch gradient is scaled at the start of the branch


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
