"""Arithmetic between tensors, concatenation, and residual sums.

Operations with a number, or of integers, are not scaled: an explicit number, such as a temperature,
is intentional.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..common.watched import watched
from ..rules.table import Scales, row, tie
from ..scale import scale_each, scale_output, written_to
from .generated import spellings

Number = Tensor | float


def shares(*operands: Tensor) -> list[float]:
    """Returns, for each operand, 1/sqrt of the number of elements of the result that read one of
    its elements."""
    size = math.prod(torch.broadcast_shapes(*[t.shape for t in operands])) or 1
    return [float(((t.numel() or 1) / size) ** 0.5) for t in operands]


def _binary(
    fn: Callable[..., Tensor],
    input: Any,
    other: Any,
    s: Scales,
) -> Tensor:
    """``fn(input, other)`` with the factors of ``s``, which are 1 for numbers; one pass if the
    factors of the operands are equal."""
    if s["input"] == s["other"]:
        return scale_output(fn(input, other), s["output"], s["input"])
    terms = scale_each(input, 1.0, s["input"]), scale_each(other, 1.0, s["other"])
    return scale_each(fn(*terms), s["output"], 1.0)


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
    first, second, number = 1.0, 1.0, False
    if input.shape != other.shape:
        first, second = shares(input, other)
        sizes = (input.numel(), other.numel())
        number = max(sizes) > 1 == min(sizes)
    output = 1.0 if number else (1 + alpha * alpha) ** -0.5
    second /= abs(alpha) or 1.0
    return tie(constraint, output=output, input=first, other=second)


def _is_float(value: Number) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and (
        value.dtype.is_floating_point or value.dtype.is_complex
    )


@row(add_scales, replaces=[*spellings("add", operator="add"), Tensor.__radd__])
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
        alpha: the factor of ``other``.
        out: a tensor that the result is copied into and that is returned; may require gradients.
    """
    s = add_scales(input, other, constraint, alpha)
    return written_to(out, _binary(partial(torch.add, alpha=alpha), input, other, s))


@row(
    add_scales,
    replaces=[
        *spellings("sub", "subtract", operator="sub"),
        Tensor.__rsub__,
        torch.rsub,
    ],
)
def sub(
    input: Number,
    other: Number,
    constraint: str | None = "to_output_scale",
    alpha: float = 1,
) -> Tensor:
    """Computes ``s * (input - alpha * other)``; arguments are as in `add`."""
    return add(input, other, constraint, -alpha)


# Products


def mul_scales(
    input: Number, other: Number, constraint: str | None = "to_output_scale"
) -> Scales:
    """The product of uncorrelated factors of RMS 1 has RMS 1; a broadcast factor sums gradients.

    Products with a number or of integers are not scaled.
    """
    scales = {"output": 1.0, "input": 1.0, "other": 1.0}
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return scales
    if not (input.dtype.is_floating_point and other.dtype.is_floating_point):
        return scales
    if input.shape != other.shape:
        scales["input"], scales["other"] = shares(input, other)
    return tie(constraint, **scales)


@row(
    mul_scales,
    replaces=[*spellings("mul", "multiply", operator="mul"), Tensor.__rmul__],
)
def mul(
    input: Number, other: Number, constraint: str | None = "to_output_scale"
) -> Tensor:
    """Computes ``input * other``, which has RMS 1; gradients of broadcast operands are scaled.

    Arguments are as in `add`.
    """
    return _binary(torch.mul, input, other, mul_scales(input, other, constraint))


def div_scales(
    input: Tensor, other: Number, constraint: str | None = "to_output_scale"
) -> Scales:
    """Returns the scales of `mul_scales`, for a divisor of magnitude about 1 (a norm, an average).

    The inverse of a standard normal variable has no finite second moment, and therefore no factor.
    """
    return mul_scales(input, other, constraint)


@row(div_scales, replaces=spellings("div", "divide", "true_divide", operator="truediv"))
def div(
    input: Tensor,
    other: Number,
    constraint: str | None = "to_output_scale",
    rounding_mode: str | None = None,
) -> Tensor:
    """Computes ``input / other``, for a divisor of magnitude about 1.

    Division by 0 gives Inf or NaN, as in torch. ``rounding_mode`` is torch's, other arguments are
    as in `add`.
    """
    divide = partial(torch.div, rounding_mode=rounding_mode)
    return _binary(divide, input, other, div_scales(input, other, constraint))


# Concatenation


def cat_scales() -> Scales:
    """Concatenation keeps the scale of its tensors and of their gradients."""
    return {"output": 1.0, "tensors": 1.0}


@row(cat_scales, replaces=(torch.cat, torch.concat, torch.concatenate))
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`; no factor is needed."""
    return torch.cat(tensors, dim)  # type: ignore[arg-type]


@row(cat_scales, replaces=(torch.stack,))
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.stack`; no factor is needed."""
    return torch.stack(tensors, dim)  # type: ignore[arg-type]


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

    Gradients inside the branch have RMS 1, as if its weight were 1; here they are multiplied by the
    branch's weight.

    Args:
        tau: the weight of the branch relative to the skip connection, at least 0, and the same as
            in `residual_add`, which ends the branch.
    """
    branch, skip = _weights(tau)
    # Where the branch begins, as in 0.3.5: gradients inside of it have RMS 1.
    return scale_each(input, 1.0, branch), scale_each(input, 1.0, skip)


@watched
def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """Computes ``(tau * residual + skip) / sqrt(1 + tau**2)``; gradients are propagated unscaled.

    ``residual`` and ``skip`` start as the results of `residual_split`, and may be broadcast.
    """
    a, b = _weights(tau)
    return scale_each(residual, a, 1.0) + scale_each(skip, b, 1.0)


def residual_apply(
    fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0
) -> Tensor:
    """Computes ``(tau * fn(input) + input) / sqrt(1 + tau**2)``, unit-scaled in both directions.

    >>> residual_apply(torch.relu, torch.tensor([-2.0, 2.0]), tau=1.0)
    tensor([-1.4142,  2.8284])
    """
    branch, skip = residual_split(input, tau)
    return residual_add(fn(branch), skip, tau)
