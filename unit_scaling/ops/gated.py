"""Gated units, prelu, and the relatives of softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.batch import row_scale
from ..rules.elementwise import elementwise_factors, elementwise_scales
from ..rules.table import Scales, factors, row, tie
from ..scale import scale_each, scale_output
from .activations import softmax, softmax_scales

__all__ = ["geglu", "glu", "log_softmax", "prelu", "reglu", "softmin"]


def glu_scales(constraint: str | None = "to_output_scale") -> Scales:
    """A standard normal times the sigmoid of another; the gradient's two halves together."""
    s = elementwise_scales(torch.sigmoid, constraint=None)
    gradient = (s["output"] ** -2 + s["input"] ** -2) / 2
    return tie(constraint, output=s["output"], input=gradient**-0.5)


@row(glu_scales, replaces=(F.glu,))
def glu(input: Tensor, dim: int = -1, constraint: str | None = "to_output_scale") -> Tensor:
    """``s * a * sigmoid(b)``, where a and b are the halves of input along ``dim``.

    input: floating point, of an even size along dim. Returns half of that size.
    """
    fwd, bwd = factors(glu_scales, constraint)
    return scale_output(F.glu(input, dim), fwd, bwd, fresh=True)


def geglu_scales(mult: float = 1.0, approximate: str = "none") -> Scales:
    """One scale for all, 1/RMS of gelu: input and gate meet in a product."""
    named = {"approximate": approximate}
    scale = elementwise_scales(F.gelu, (), named, mult)["output"]
    return {"output": scale, "input": scale, "gate": scale}


@row(geglu_scales)
def geglu(input: Tensor, gate: Tensor, mult: float = 1.0, approximate: str = "none") -> Tensor:
    """``s * input * gelu(mult * gate) / mult`` (Shazeer 2020, arXiv 2002.05202).

    input, gate: of shapes that broadcast together, floating point. mult: how non-linear the gate
    is, above 0. approximate: "none" or "tanh", as in `torch.nn.functional.gelu`.
    """
    scale = geglu_scales(mult, approximate)["output"] / mult
    gate = gate if mult == 1.0 else gate * mult
    return (input * F.gelu(gate, approximate=approximate)).mul_(scale)


def reglu_scales() -> Scales:
    """One scale for all, 1/RMS of relu: sqrt(2)."""
    scale = math.sqrt(2)
    return {"output": scale, "input": scale, "gate": scale}


@row(reglu_scales)
def reglu(input: Tensor, gate: Tensor) -> Tensor:
    """``s * input * relu(gate)`` (Shazeer 2020, arXiv 2002.05202).

    input, gate: of shapes that broadcast together, floating point.
    """
    return (input * F.relu(gate)).mul_(math.sqrt(2))


def prelu_scales(
    input: Tensor, weight: Tensor, constraint: str | None = "to_output_scale"
) -> Scales:
    """As leaky_relu with the slope 1/4 that torch starts from; a slope collects all negatives."""
    fwd, bwd = elementwise_factors(F.leaky_relu, (0.25,), {}, 1.0, constraint)
    collected = row_scale(input.numel() // (weight.numel() or 1), 0.5)
    return {"output": fwd, "input": bwd, "weight": 2**0.5 * collected}


@row(prelu_scales, replaces=(F.prelu, torch.prelu, torch.Tensor.prelu))
def prelu(input: Tensor, weight: Tensor, constraint: str | None = "to_output_scale") -> Tensor:
    """``s * prelu(input, weight)``, with a unit-scaled gradient of the slopes.

    input: floating point, channels second. weight: one slope, or one for each channel.
    """
    s = prelu_scales(input, weight, constraint)
    output = F.prelu(input, scale_each(weight, 1.0, s["weight"] / s["input"]))
    return scale_output(output, s["output"], s["input"], fresh=True)


def _torch_nn_form(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    return {"input": input, "dim": dim, "dtype": dtype}


def _torch_form(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    return {"input": input, "dim": dim, "dtype": dtype}


def softmin_scales(
    input: Tensor,
    dim: int | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Scales:
    """As `softmax_scales`."""
    return softmax_scales(input, dim, constraint, mult)


@row(softmin_scales, adapters={F.softmin: _torch_nn_form})
def softmin(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Tensor:
    """``s * softmax(-mult * input)`` along ``dim``; arguments as in `softmax`."""
    return softmax(-input, dim, dtype, constraint, mult)


def log_softmax_scales() -> Scales:
    """Log-probabilities are kept: losses read them. The gradient is ``g - softmax * sum(g)``."""
    return {"output": 1.0, "input": 1.0}


@row(
    log_softmax_scales,
    adapters={
        F.log_softmax: _torch_nn_form,
        torch.log_softmax: _torch_form,
        torch.Tensor.log_softmax: _torch_form,
        torch.special.log_softmax: _torch_form,
    },
)
def log_softmax(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, mult: float = 1.0
) -> Tensor:
    """``log_softmax(mult * input)`` along ``dim``: log-probabilities, which are not scaled.

    For a unit normal input the gradient has RMS 1 up to 1/sqrt(classes).
    """
    logits = input if mult == 1.0 else input * mult
    return F.log_softmax(logits, dim, dtype=dtype, _stacklevel=5)
