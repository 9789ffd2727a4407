"""Dropout of elements and of channels."""

from __future__ import annotations

import math

from torch.nn import functional as F

from ..rules.table import Scales
from .generated import unary


def dropout_scales(p: float = 0.5, training: bool = True) -> Scales:
    """Zeroing a fraction p and dividing by 1 - p multiplies the RMS by 1/sqrt(1 - p)."""
    # No dropout in evaluation, no factor: 0.3.5 has 0.7 there for p = 0.5.
    scale = math.sqrt(1 - p) if training and p < 1 else 1.0
    return {"output": scale, "input": scale}


_ABOUT = """Computes ``s * dropout(input, p)``; the identity if not training.

Args:
    input: any shape, floating point.
    p: the fraction set to zero, in [0, 1].
    training: whether to apply dropout.
    inplace: write the result into ``input``.

Raises:
    ValueError: p is outside [0, 1].
"""
_CHANNELS = "`dropout` of whole channels, for input (batch, channels, {})."
_SETTINGS = {"p": 0.5, "training": True, "inplace": False}

dropout = unary(F.dropout, dropout_scales, _ABOUT, _SETTINGS)
dropout1d = unary(F.dropout1d, dropout_scales, _CHANNELS.format("length"), _SETTINGS)
dropout2d = unary(F.dropout2d, dropout_scales, _CHANNELS.format("h, w"), _SETTINGS)
dropout3d = unary(F.dropout3d, dropout_scales, _CHANNELS.format("d, h, w"), _SETTINGS)
