"""Elementwise operations, softmax and dropout."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..common.constant import specialised
from ..core.functional import logarithmic_interpolation
from ..rules.table import Scales, factors, row, tie
from ..scale import kept_in, scale_each, scale_output
from . import from_output, fused

__all__ = ["add", "dropout", "gelu", "silu", "silu_glu", "softmax"]

# The standard deviation of relu(x) for a standard normal x is sqrt((1 - 1/pi) / 2), and the RMS
# of its derivative is sqrt(1/2): gelu and silu tend to relu as mult grows. At small mult both are
# x/2, with 1/2 for a derivative. The interpolation weights in between are fits to measured values,
# within 4 % of exact at mult = 1 (u-muP, arXiv 2407.17465, appendix B).
_RELU_STD = math.sqrt((1 - 1 / math.pi) / 2)
_RELU_GRAD_RMS = math.sqrt(1 / 2)
_LINEAR_STD = 1 / 2


def _alpha(weight: float, mult: float) -> float:
    """How near an op is to its limit for a large mult. Raises ValueError for what is no number
    above 0, as torch's own arguments are by position: ``silu(x, inplace)``."""
    default = mult == 1.0 and mult is not True  # all that most graphs look at
    if not default and (isinstance(mult, (bool, str)) or not mult > 0):
        raise ValueError(f"mult is {mult!r}, not a number above 0; give torch's arguments by name")
    return 1 / (1 + weight / mult**2)


def _gated_scale(weight: float, mult: float, limit: float) -> float:
    """1 / the RMS of x * sigmoid-like(mult * x): between x/2 and relu-like as mult grows."""
    alpha = _alpha(weight, mult)
    return logarithmic_interpolation(alpha, 1 / _LINEAR_STD, 1 / limit)


def _torch_gelu(input: Tensor, *, approximate: str = "none") -> dict[str, Any]:
    return {"input": input, "approximate": approximate}


def gelu_scales(mult: float = 1.0, constraint: str | None = "to_output_scale") -> Scales:
    """Interpolated between x/2 and relu; measured weights 1/4 and 1/4."""
    output = _gated_scale(1 / 4, mult, _RELU_STD)
    return tie(constraint, output=output, input=_gated_scale(1 / 4, mult, _RELU_GRAD_RMS))


@row(gelu_scales, adapters={F.gelu: _torch_gelu})
def gelu(
    input: Tensor,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
    approximate: str = "none",
) -> Tensor:
    """``s * gelu(mult * input) / mult``.

    input: any shape, floating point. mult: how non-linear it is, above 0. approximate: "none" or
    "tanh", as in `torch.nn.functional.gelu`. Returns the shape and dtype of input.
    """
    mult = mult if mult == 1.0 else specialised(mult)
    fwd, bwd = factors(gelu_scales, mult, constraint, mult=mult)
    input = input if mult == 1.0 else input * mult
    if fused.applies(input) and approximate in ("none", "tanh"):
        return fused.activation(input, "gelu", fwd, bwd, approximate)
    return scale_output(F.gelu(input, approximate=approximate), fwd, bwd, fresh=True)


def silu_scales(mult: float = 1.0, constraint: str | None = "to_output_scale") -> Scales:
    """Interpolated between x/2 and relu; measured weights 1/4 and 1."""
    output = _gated_scale(1 / 4, mult, _RELU_STD)
    return tie(constraint, output=output, input=_gated_scale(1, mult, _RELU_GRAD_RMS))


def _torch_silu(input: Tensor, inplace: bool = False) -> dict[str, Any]:
    return {"input": input, "inplace": inplace}


@row(silu_scales, adapters={F.silu: _torch_silu})
def silu(
    input: Tensor,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
    inplace: bool = False,
) -> Tensor:
    """``s * silu(mult * input) / mult``.

    input: any shape, floating point. mult: how non-linear it is, above 0. inplace: write the
    result into ``input``. Returns the shape and dtype of input.
    """
    mult = mult if mult == 1.0 else specialised(mult)
    fwd, bwd = factors(silu_scales, mult, constraint, mult=mult)
    x = input if mult == 1.0 else input * mult
    x = x.clone() if inplace and x is input else x  # what autograd saves must not be written to
    if fused.applies(x):
        output = fused.activation(x, "silu", fwd, bwd)
    else:
        output = scale_output(F.silu(x), fwd, bwd, fresh=True)
    return input.copy_(output) if inplace else output


def silu_glu_scales(mult: float = 1.0) -> Scales:
    """One scale for all: input and gate meet in a product, so their gradients are tied."""
    scale = _gated_scale(1, mult, _RELU_GRAD_RMS)
    return {"output": scale, "input": scale, "gate": scale}


@row(silu_glu_scales)
def silu_glu(input: Tensor, gate: Tensor, mult: float = 1.0) -> Tensor:
    """``s * input * silu(mult * gate) / mult``: the gated unit of Llama's MLP.

    input, gate: of shapes that broadcast together, floating point. mult: how non-linear the gate
    is, above 0.
    """
    s = silu_glu_scales(mult)
    scale = s["output"] / mult
    gate = gate if mult == 1.0 else gate * mult
    if fused.applies(input, gate):
        return fused.silu_glu(input, gate, scale)
    return (input * F.silu(gate)).mul_(scale)


def _softmax_dim(input: Tensor, dim: int | None) -> int:
    """The dimension that `torch.nn.functional.softmax` takes where none is given."""
    if dim is not None:
        return dim
    return 0 if input.dim() in (0, 1, 3) else 1


def softmax_scales(
    input: Tensor,
    dim: int | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Scales:
    """Between n (near uniform) and sqrt(n) as mult grows, with a measured weight. n: entries.

    The gradient: between n/mult and sqrt(n/mult) (u-muP, arXiv 2407.17465, appendix B).
    """
    size = input.size(_softmax_dim(input, dim)) if input.dim() else 1
    if size == 0:
        return tie(constraint, output=1.0, input=1.0)
    power = 1 - _alpha(4, mult) / 2  # of `logarithmic_interpolation` between a number and its root
    return tie(constraint, output=size**power, input=(size / mult) ** power)


def _torch_nn_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    return {"input": input, "dim": dim, "dtype": dtype}


def _torch_softmax(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    return {"input": input, "dim": dim, "dtype": dtype}


@row(
    softmax_scales,
    adapters={
        F.softmax: _torch_nn_softmax,
        torch.softmax: _torch_softmax,
        torch.Tensor.softmax: _torch_softmax,
    },
)
def softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Tensor:
    """``s * softmax(mult * input)`` along ``dim``.

    input: floating point. dim: None takes the one that torch takes. dtype: cast the input first.
    mult: the inverse of a temperature. Returns the shape of input. The entries sum to s, not 1.
    """
    s = softmax_scales(input, dim, constraint, mult)
    logits = input if mult == 1.0 else input * mult
    axis = _softmax_dim(input, dim)
    if is_compiling():
        logits = logits if dtype is None else logits.to(dtype)
        return from_output.activation(logits, "softmax", s["output"], s["input"], axis)
    output = F.softmax(logits, axis, dtype=dtype)
    return scale_output(output, s["output"], s["input"], fresh=False)


def dropout_scales(input: Tensor, p: float = 0.5, training: bool = True) -> Scales:
    """Zeroing a share p and dividing by 1 - p multiplies the RMS by 1/sqrt(1 - p)."""
    scale = math.sqrt(1 - p) if training and p < 1 else 1.0
    return {"output": scale, "input": scale}


def _torch_dropout(
    input: Tensor, p: float = 0.5, train: bool = True, **training: bool
) -> dict[str, Any]:
    return {"input": input, "p": p, "training": train, **training}


@row(dropout_scales, replaces=(F.dropout, torch.dropout), adapters={torch.dropout: _torch_dropout})
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``s * dropout(input, p)``; the identity when not training.

    input: any shape, floating point. p: the share set to zero, in [0, 1]. inplace: write the
    result into ``input``. Raises ValueError for p outside [0, 1], as torch does.
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
    """Independent terms: 1/sqrt(1 + alpha**2); a broadcast term collects that many gradients.

    A sum with a number, or of integers, is left alone; so is what a tensor of one element is added
    to, a number that has a gradient.
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


def _torch_add(
    input: Tensor | float, other: Tensor | float, *, alpha: float = 1, out: Tensor | None = None
) -> dict[str, Any]:
    return {"input": input, "other": other, "alpha": alpha, "out": out}


def _torch_add_(input: Tensor, other: Tensor | float, *, alpha: float = 1) -> dict[str, Any]:
    return {"input": input, "other": other, "alpha": alpha, "out": input}


@row(
    add_scales,
    adapters={
        torch.add: _torch_add,
        torch.Tensor.add: _torch_add,
        torch.Tensor.__add__: _torch_add,
        torch.Tensor.__radd__: _torch_add,
        operator.add: _torch_add,
        torch.Tensor.add_: _torch_add_,
        torch.Tensor.__iadd__: _torch_add_,
        operator.iadd: _torch_add_,
    },
)
def add(
    input: Tensor | float,
    other: Tensor | float,
    constraint: str | None = "to_output_scale",
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """``s * (input + alpha * other)``; a sum with a number, or of integers, is not scaled.

    input, other: tensors of shapes that broadcast together, or one of them a number, which a tensor
    of one element is too.
    out: a tensor to copy the result into, returned in its place; it may carry gradients.
    """
    s = add_scales(input, other, constraint, alpha)
    if s["input"] == s["other"]:
        output = torch.add(input, other, alpha=alpha)
        # With factors of 1 the output is torch's own; otherwise both terms are float tensors.
        output = scale_output(output, s["output"], s["input"], fresh=True)
    else:
        assert isinstance(input, Tensor)
        assert isinstance(other, Tensor)
        input = scale_each(input, 1.0, s["input"])
        output = input.add(scale_each(other, 1.0, s["other"]), alpha=alpha)
        output = scale_each(output, s["output"], 1.0)
    return kept_in(out, output)
