"""Addition, softmax, dropout, and the gated unit of silu."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.functional import logarithmic_interpolation
from ..rules.table import Adapter, Scales, positional, row, tie
from ..scale import kept_in, scale_each, scale_output
from . import from_output

__all__ = ["add", "dropout", "silu_glu", "softmax"]

# For standard normal x, the standard deviation of relu(x) is sqrt((1 - 1/pi) / 2), and the RMS of
# its derivative is sqrt(1/2). gelu and silu tend to relu as mult grows; at small mult both tend to
# x/2 with derivative 1/2. The interpolation weights in between are fits to measurements, within 4 %
# of the exact value at mult = 1. Source: u-muP, arXiv 2407.17465, appendix B.
RELU_STD = math.sqrt((1 - 1 / math.pi) / 2)
RELU_GRAD_RMS = math.sqrt(1 / 2)
_LINEAR_STD = 1 / 2


def _alpha(weight: float, mult: float) -> float:
    """The interpolation weight of an op's limit for large mult. Raises ValueError if mult is not a
    positive number, as for torch's positional arguments: ``silu(x, inplace)``.
    """
    default = mult == 1.0 and mult is not True  # the only check in most graphs
    if not default and (isinstance(mult, (bool, str)) or not mult > 0):
        raise ValueError(f"mult is {mult!r}, not a number above 0; give torch's arguments by name")
    return 1 / (1 + weight / mult**2)


def gated_scale(weight: float, mult: float, limit: float) -> float:
    """1/RMS of x * sigmoid-like(mult * x): between x/2 and relu-like as mult grows."""
    alpha = _alpha(weight, mult)
    return logarithmic_interpolation(alpha, 1 / _LINEAR_STD, 1 / limit)


def silu_glu_scales(mult: float = 1.0) -> Scales:
    """One scale for all: input and gate are multiplied, so their gradients are tied."""
    scale = gated_scale(1, mult, RELU_GRAD_RMS)
    return {"output": scale, "input": scale, "gate": scale}


@row(silu_glu_scales)
def silu_glu(input: Tensor, gate: Tensor, mult: float = 1.0) -> Tensor:
    """Computes ``s * input * silu(mult * gate) / mult``, the gated unit of Llama's MLP.

    Args:
        input: floating point, broadcastable with ``gate``.
        gate: floating point.
        mult: the non-linearity of the gate, above 0.

    Returns:
        The broadcast shape.
    """
    s = silu_glu_scales(mult)
    scale = s["output"] / mult
    gate = gate if mult == 1.0 else gate * mult
    return (input * F.silu(gate)).mul_(scale)


def _softmax_dim(input: Tensor, dim: int | None) -> int:
    """The dimension, with the default of `torch.nn.functional.softmax`."""
    if dim is not None:
        return dim
    return 0 if input.dim() in (0, 1, 3) else 1


def softmax_scales(
    input: Tensor,
    dim: int | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Scales:
    """Between n (near uniform) and sqrt(n) as mult grows, with a fitted weight, for n entries.

    The gradient is between n/mult and sqrt(n/mult). Source: u-muP, arXiv 2407.17465, appendix B.
    """
    size = input.size(_softmax_dim(input, dim)) if input.dim() else 1
    if size == 0:
        return tie(constraint, output=1.0, input=1.0)
    power = 1 - _alpha(4, mult) / 2  # logarithmic interpolation of n and its root
    return tie(constraint, output=size**power, input=(size / mult) ** power)


#: torch.nn.functional's form of softmax, log_softmax and softmin.
NN_SOFTMAX = positional("input dim _stacklevel dtype", _stacklevel=None)


@row(
    softmax_scales,
    replaces=(F.softmax, torch.softmax, torch.Tensor.softmax),
    adapters={F.softmax: NN_SOFTMAX},
)
def softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Tensor:
    """Computes ``s * softmax(mult * input)`` along ``dim``; the entries sum to s, not 1.

    Args:
        input: any shape, floating point.
        dim: the dimension; the default of None is torch's.
        dtype: the dtype that ``input`` is cast to first.
        constraint: see `unit_scaling.constraints`.
        mult: the inverse of a temperature.

    Returns:
        The shape of ``input``.
    """
    s = softmax_scales(input, dim, constraint, mult)
    logits = input if mult == 1.0 else input * mult
    axis = _softmax_dim(input, dim)
    if from_output.applies("softmax"):
        logits = logits if dtype is None else logits.to(dtype)
        return from_output.activation(logits, "softmax", s["output"], s["input"], axis)
    output = F.softmax(logits, axis, dtype=dtype)
    return scale_output(output, s["output"], s["input"])


def dropout_scales(input: Tensor, p: float = 0.5, training: bool = True) -> Scales:
    """Zeroing a fraction p and dividing by 1 - p multiplies the RMS by 1/sqrt(1 - p)."""
    scale = math.sqrt(1 - p) if training and p < 1 else 1.0
    return {"output": scale, "input": scale}


#: torch's form of dropout.
DROPOUT = positional("input p train", train="training")


@row(dropout_scales, replaces=(F.dropout, torch.dropout), adapters={torch.dropout: DROPOUT})
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Computes ``s * dropout(input, p)``; the identity if not training.

    Args:
        input: any shape, floating point.
        p: the fraction set to zero, in [0, 1].
        training: whether to apply dropout.
        inplace: write the result into ``input``.

    Returns:
        The shape and dtype of ``input``.

    Raises:
        ValueError: p is outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    output = F.dropout(input, p, training, inplace)
    s = dropout_scales(input, p, training)
    return output.mul_(s["output"]) if s["output"] != 1.0 else output


def add_scales(
    input: Tensor | float,
    other: Tensor | float,
    constraint: str | None = "to_output_scale",
    alpha: float = 1,
) -> Scales:
    """Uncorrelated terms: 1/sqrt(1 + alpha**2); a broadcast term sums the gradients of its copies.

    Sums with a number, sums of integers, and tensors added to a one-element tensor (a number with a
    gradient) are not scaled.
    """
    if not _is_float(input) or not _is_float(other):
        return {"output": 1.0, "input": 1.0, "other": 1.0}
    assert isinstance(input, Tensor)
    assert isinstance(other, Tensor)
    grads, number = [1.0, 1.0], False
    if input.shape != other.shape:
        size = math.prod(torch.broadcast_shapes(input.shape, other.shape))
        grads = [math.sqrt(t.numel() / size) if t.numel() else 1.0 for t in (input, other)]
        number = size > 1 == min(input.numel(), other.numel())
    return tie(
        constraint,
        output=1.0 if number else (1 + alpha * alpha) ** -0.5,
        input=grads[0],
        other=grads[1] / abs(alpha) if alpha else grads[1],
    )


def _is_float(value: Tensor | complex) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


#: torch's form of addition and subtraction, which take further arguments by name.
BINARY = positional("input other")


def written(input: Tensor, other: Tensor | float, **named: Any) -> dict[str, Any]:
    """Adapts torch's in-place form of addition and subtraction."""
    return {"input": input, "other": other, "out": input, **named}


def operators(names: str, symbol: str, plain: Adapter, in_place: Adapter) -> dict[Any, Adapter]:
    """Every spelling of a binary operation, with its adapter.

    names: torch's names, separated by spaces. symbol: that of Python's operator.
    """
    found: dict[Any, Adapter] = {
        getattr(space, name + mark): adapter
        for mark, adapter in (("", plain), ("_", in_place))
        for name in names.split()
        for space in (torch, Tensor)
        if hasattr(space, name + mark)
    }
    for mark, adapter in (("", plain), ("i", in_place)):
        found[getattr(Tensor, f"__{mark}{symbol}__")] = adapter
        found[getattr(operator, mark + symbol)] = adapter
    return found


@row(
    add_scales,
    adapters={**operators("add", "add", BINARY, written), torch.Tensor.__radd__: BINARY},
)
def add(
    input: Tensor | float,
    other: Tensor | float,
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

    Returns:
        The broadcast shape.
    """
    s = add_scales(input, other, constraint, alpha)
    if s["input"] == s["other"]:
        output = torch.add(input, other, alpha=alpha)
        # With factors of 1 the output is torch's own; otherwise both terms are float tensors.
        output = scale_output(output, s["output"], s["input"])
    else:
        assert isinstance(input, Tensor)
        assert isinstance(other, Tensor)
        input = scale_each(input, 1.0, s["input"])
        output = input.add(scale_each(other, 1.0, s["other"]), alpha=alpha)
        output = scale_each(output, s["output"], 1.0)
    return kept_in(out, output)
