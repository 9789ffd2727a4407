"""Dropout of channels, and alpha dropout; see activations.py for elementwise dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.one_call import one_call
from ..rules.table import Scales, row, tie
from ..scale import scale_each
from .activations import dropout_scales

__all__ = ["alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"]

# The limit of selu at minus infinity, -scale * alpha: the value of a dropped element. Source:
# Klambauer et al. 2017, "Self-Normalizing Neural Networks", section 2.
_DROPPED = -1.7580993408473766


def _check(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def channel_dropout_scales(input: Tensor, p: float = 0.5, training: bool = True) -> Scales:
    """As `dropout_scales`: zeroing a fraction p of the channels and dividing by 1 - p."""
    return dropout_scales(input, p, training)


def _channel_dropout(
    fn: Callable[..., Tensor], input: Tensor, p: float, training: bool, inplace: bool
) -> Tensor:
    _check(p)
    output = fn(input, p, training, inplace)
    scale = dropout_scales(input, p, training)["output"]
    return output.mul_(scale) if scale != 1.0 else output


@row(channel_dropout_scales, replaces=(F.dropout1d,))
@one_call
def dropout1d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Computes ``s * dropout1d(input, p)`` of (batch, channels, length); arguments as in
    `dropout`."""
    return _channel_dropout(F.dropout1d, input, p, training, inplace)


@row(channel_dropout_scales, replaces=(F.dropout2d,))
@one_call
def dropout2d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Computes ``s * dropout2d(input, p)`` of (batch, channels, h, w); arguments as in
    `dropout`."""
    return _channel_dropout(F.dropout2d, input, p, training, inplace)


@row(channel_dropout_scales, replaces=(F.dropout3d,))
@one_call
def dropout3d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Computes ``s * dropout3d(input, p)`` of (batch, channels, d, h, w); arguments as in
    `dropout`.
    """
    return _channel_dropout(F.dropout3d, input, p, training, inplace)


def alpha_dropout_scales(
    p: float = 0.5, training: bool = True, constraint: str | None = "to_output_scale"
) -> Scales:
    """Torch's op keeps mean 0 and variance 1; only the gradient of the kept fraction 1 - p is
    scaled.
    """
    gradient = math.sqrt(1 + p * _DROPPED**2) if training and p < 1 else 1.0
    return tie(constraint, output=1.0, input=gradient)


def _alpha_dropout(
    fn: Callable[..., Tensor],
    input: Tensor,
    p: float,
    training: bool,
    inplace: bool,
    constraint: str | None,
) -> Tensor:
    _check(p)
    output = fn(input, p, training, inplace)
    scale = alpha_dropout_scales(p, training, constraint)["input"]
    return output if scale == 1.0 else scale_each(output, 1.0, scale)


def _torch_form(input: Tensor, p: float = 0.5, train: bool = True, **named: Any) -> dict[str, Any]:
    return {"input": input, "p": p, "training": train, **named}


@row(
    alpha_dropout_scales,
    replaces=(F.alpha_dropout, torch.alpha_dropout),
    adapters={torch.alpha_dropout: _torch_form},
)
@one_call
def alpha_dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """`torch.nn.functional.alpha_dropout`, for use with selu, with a unit-scaled gradient.

    Raises:
        ValueError: p is outside [0, 1].
    """
    return _alpha_dropout(F.alpha_dropout, input, p, training, inplace, constraint)


@row(
    alpha_dropout_scales,
    replaces=(F.feature_alpha_dropout, torch.feature_alpha_dropout),
    adapters={torch.feature_alpha_dropout: _torch_form},
)
@one_call
def feature_alpha_dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """`alpha_dropout` of whole channels, for input (batch, channels, ...)."""
    return _alpha_dropout(F.feature_alpha_dropout, input, p, training, inplace, constraint)
