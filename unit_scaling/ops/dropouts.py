"""Dropout of elements and of channels, and alpha dropout."""

from __future__ import annotations

import math

from torch.nn import functional as F

from ..rules.table import Scales, tie
from .generated import CONSTRAINT, unary

# The square of the value of a dropped element: the limit of selu at minus infinity, -scale * alpha.
# Source: Klambauer et al. 2017, "Self-Normalizing Neural Networks", section 2.
_DROPPED_SQUARE = 1.7580993408473766**2


def dropout_scales(p: float = 0.5, training: bool = True) -> Scales:
    """Zeroing a fraction p and dividing by 1 - p multiplies the RMS by 1/sqrt(1 - p)."""
    scale = math.sqrt(1 - p) if training and p < 1 else 1.0
    return {"output": scale, "input": scale}


def alpha_dropout_scales(
    p: float = 0.5, training: bool = False, constraint: str | None = "to_output_scale"
) -> Scales:
    """Torch's op keeps mean 0 and variance 1; only the gradient of the kept fraction 1 - p is
    scaled.
    """
    gradient = math.sqrt(1 + p * _DROPPED_SQUARE) if training and p < 1 else 1.0
    return tie(constraint, output=1.0, input=gradient)


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
_SETTINGS = {"p": 0.5, "training": True, "inplace": False}
_ALPHA_SETTINGS = {**_SETTINGS, "training": False, **CONSTRAINT}

dropout = unary(F.dropout, dropout_scales, _ABOUT, _SETTINGS)
dropout1d = unary(F.dropout1d, dropout_scales, _CHANNELS.format("length"), _SETTINGS)
dropout2d = unary(F.dropout2d, dropout_scales, _CHANNELS.format("h, w"), _SETTINGS)
dropout3d = unary(F.dropout3d, dropout_scales, _CHANNELS.format("d, h, w"), _SETTINGS)
alpha_dropout = unary(F.alpha_dropout, alpha_dropout_scales, _ALPHA, _ALPHA_SETTINGS)
feature_alpha_dropout = unary(
    F.feature_alpha_dropout, alpha_dropout_scales, _FEATURES, _ALPHA_SETTINGS
)
