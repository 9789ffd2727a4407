"""Dropout of elements and of channels, and alpha dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Concatenate

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.table import Scales, row, tie
from ..scale import scale_each
from .generated import P, R, with_first

# The square of the value of a dropped element: the limit of selu at minus infinity, -scale * alpha.
# Source: Klambauer et al. 2017, "Self-Normalizing Neural Networks", section 2.
_DROPPED_SQUARE = 1.7580993408473766**2


def dropout_scales(input: Tensor, p: float = 0.5, training: bool = True) -> Scales:
    """Zeroing a fraction p and dividing by 1 - p multiplies the RMS by 1/sqrt(1 - p)."""
    scale = math.sqrt(1 - p) if training and p < 1 else 1.0
    return {"output": scale, "input": scale}


def _dropout(
    fn: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    output = fn(input, p, training, inplace)
    scale = dropout_scales(input, p, training)["output"]
    return output.mul_(scale) if scale != 1.0 else output


def alpha_dropout_scales(
    p: float = 0.5, training: bool = True, constraint: str | None = "to_output_scale"
) -> Scales:
    """Torch's op keeps mean 0 and variance 1; only the gradient of the kept fraction 1 - p is
    scaled.
    """
    gradient = math.sqrt(1 + p * _DROPPED_SQUARE) if training and p < 1 else 1.0
    return tie(constraint, output=1.0, input=gradient)


def _alpha_dropout(
    fn: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    output = fn(input, p, training, inplace)
    scale = alpha_dropout_scales(p, training, constraint)["input"]
    return output if scale == 1.0 else scale_each(output, 1.0, scale)


def _op(
    body: Callable[Concatenate[Callable[..., Tensor], P], R],
    rule: Callable[..., Scales],
    name: str,
    about: str,
) -> Callable[P, R]:
    """Adds the row of torch.nn.functional's function ``name``, and of torch's, if any."""
    theirs = [getattr(space, name) for space in (F, torch) if hasattr(space, name)]
    return row(rule, replaces=theirs)(with_first(body, theirs[0], name, about))


_ABOUT = """Computes ``s * dropout(input, p)``; the identity if not training.

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
_CHANNELS = "`dropout` of whole channels, for input (batch, channels, {})."
_ALPHA = """`torch.nn.functional.alpha_dropout`, for use with selu, with a unit-scaled gradient.

Raises:
    ValueError: p is outside [0, 1].
"""
_FEATURES = "`alpha_dropout` of whole channels, for input (batch, channels, ...)."

dropout = _op(_dropout, dropout_scales, "dropout", _ABOUT)
dropout1d = _op(_dropout, dropout_scales, "dropout1d", _CHANNELS.format("length"))
dropout2d = _op(_dropout, dropout_scales, "dropout2d", _CHANNELS.format("h, w"))
dropout3d = _op(_dropout, dropout_scales, "dropout3d", _CHANNELS.format("d, h, w"))
alpha_dropout = _op(_alpha_dropout, alpha_dropout_scales, "alpha_dropout", _ALPHA)
feature_alpha_dropout = _op(
    _alpha_dropout, alpha_dropout_scales, "feature_alpha_dropout", _FEATURES
)
