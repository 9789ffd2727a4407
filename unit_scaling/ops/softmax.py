"""Softmax, its logarithm, and softmin."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.table import Scales, positional, row, tie
from ..scale import scale_output
from .fitted import limit_weight

__all__ = ["log_softmax", "softmax", "softmin"]


def _softmax_dim(input: Tensor, dim: int | None) -> int:
    """The dimension, with the default of `torch.nn.functional.softmax`."""
    if dim is not None:
        return dim
    return 0 if input.ndim in (0, 1, 3) else 1


def softmax_scales(
    input: Tensor,
    dim: int | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Scales:
    """Between n (near uniform) and sqrt(n) as mult grows, with a fitted weight, for n entries.

    The gradient is between n/mult and sqrt(n/mult). Source: u-muP, arXiv 2407.17465, appendix B.
    """
    size = input.size(_softmax_dim(input, dim)) if input.ndim else 1
    if size == 0:
        return tie(constraint, output=1.0, input=1.0)
    power = 1 - limit_weight(4, mult) / 2  # logarithmic interpolation of n and its root
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
    output = F.softmax(logits, _softmax_dim(input, dim), dtype=dtype)
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
