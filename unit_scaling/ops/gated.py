"""Gated units: a value times an activation of another one."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.elementwise import elementwise_scales
from ..rules.table import Scales, row, tie
from ..scale import scale_output
from .fitted import RELU_GRAD_RMS, gated_scale

__all__ = ["geglu", "glu", "reglu", "silu_glu"]


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
    s = glu_scales(constraint)
    return scale_output(F.glu(input, dim), s["output"], s["input"])


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
