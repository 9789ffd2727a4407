"""Gated units, prelu, softmin and log_softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.batch import row_scale
from ..rules.elementwise import elementwise_factors, elementwise_scales
from ..rules.table import Scales, factors, row, tie
from ..scale import scale_each, scale_output
from .activations import NN_SOFTMAX, softmax, softmax_scales

__all__ = ["geglu", "glu", "log_softmax", "prelu", "reglu", "softmin"]


def glu_scales(constraint: str | None = "to_output_scale") -> Scales:
    """A standard normal times the sigmoid of another; one factor for both halves of the
    gradient."""
    s = elementwise_scales(torch.sigmoid, constraint=None)
    gradient = (s["output"] ** -2 + s["input"] ** -2) / 2
    return tie(constraint, output=s["output"], input=gradient**-0.5)


@row(glu_scales, replaces=(F.glu,))
def glu(input: Tensor, dim: int = -1, constraint: str | None = "to_output_scale") -> Tensor:
    """Computes ``s * a * sigmoid(b)``, where a and b are the halves of ``input`` along ``dim``.

    Args:
        input: floating point, of even size along ``dim``.
        dim: the dimension to split.
        constraint: see `unit_scaling.constraints`.

    Returns:
        Half of the size of ``input`` along ``dim``.
    """
    fwd, bwd = factors(glu_scales, constraint)
    return scale_output(F.glu(input, dim), fwd, bwd)


def geglu_scales(mult: float = 1.0, approximate: str = "none") -> Scales:
    """One scale for all, 1/RMS of gelu: input and gate are multiplied."""
    named = {"approximate": approximate}
    scale = elementwise_scales(F.gelu, (), named, mult)["output"]
    return {"output": scale, "input": scale, "gate": scale}


@row(geglu_scales)
def geglu(input: Tensor, gate: Tensor, mult: float = 1.0, approximate: str = "none") -> Tensor:
    """Computes ``s * input * gelu(mult * gate) / mult``.

    Args:
        input: floating point, broadcastable with ``gate``.
        gate: floating point.
        mult: the non-linearity of the gate, above 0.
        approximate: "none" or "tanh", as in `torch.nn.functional.gelu`.

    Source: Shazeer 2020, arXiv 2002.05202.
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
    """Computes ``s * input * relu(gate)``.

    Args:
        input: floating point, broadcastable with ``gate``.
        gate: floating point.

    Source: Shazeer 2020, arXiv 2002.05202.
    """
    return (input * F.relu(gate)).mul_(math.sqrt(2))


def prelu_scales(
    input: Tensor, weight: Tensor, constraint: str | None = "to_output_scale"
) -> Scales:
    """As leaky_relu with torch's initial slope 1/4; a slope's gradient sums over all negative
    inputs.
    """
    fwd, bwd = elementwise_factors(F.leaky_relu, (0.25,), {}, 1.0, constraint)
    collected = row_scale(input.numel() // (weight.numel() or 1), 0.5)
    return {"output": fwd, "input": bwd, "weight": 2**0.5 * collected}


@row(prelu_scales, replaces=(F.prelu, torch.prelu, torch.Tensor.prelu))
def prelu(input: Tensor, weight: Tensor, constraint: str | None = "to_output_scale") -> Tensor:
    """Computes ``s * prelu(input, weight)``, with a unit-scaled gradient of the slopes.

    Args:
        input: floating point, (batch, channels, ...).
        weight: one slope, or one for each channel.
        constraint: see `unit_scaling.constraints`.
    """
    s = prelu_scales(input, weight, constraint)
    output = F.prelu(input, scale_each(weight, 1.0, s["weight"] / s["input"]))
    return scale_output(output, s["output"], s["input"])


@row(softmax_scales, adapters={F.softmin: NN_SOFTMAX})
def softmin(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Tensor:
    """Computes ``s * softmax(-mult * input)`` along ``dim``; arguments as in `softmax`."""
    return softmax(-input, dim, dtype, constraint, mult)


def log_softmax_scales() -> Scales:
    """Log-probabilities are not scaled, as losses use them. The gradient is ``g - softmax *
    sum(g)``.
    """
    return {"output": 1.0, "input": 1.0}


@row(
    log_softmax_scales,
    replaces=(
        F.log_softmax,
        torch.log_softmax,
        torch.Tensor.log_softmax,
        torch.special.log_softmax,
    ),
    adapters={F.log_softmax: NN_SOFTMAX},
)
def log_softmax(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, mult: float = 1.0
) -> Tensor:
    """Computes ``log_softmax(mult * input)`` along ``dim``; log-probabilities are not scaled.

    For a unit normal input, the gradient has RMS 1 up to 1/sqrt(classes). Arguments are as in
    `softmax`.
    """
    logits = input if mult == 1.0 else input * mult
    return F.log_softmax(logits, dim, dtype=dtype, _stacklevel=5)
