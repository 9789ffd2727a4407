"""Dropout of elements and of channels, and alpha dropout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.table import Scales, positional, row, tie
from ..scale import scale_each
from .generated import with_first

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
    return _dropout(F.dropout, input, p, training, inplace)


def _of_channels(fn: Callable[..., Tensor], shape: str) -> Callable[..., Tensor]:
    """Adds the row of a dropout of channels of inputs of this shape."""
    name = fn.__name__
    about = f"Computes ``s * {name}(input, p)`` of {shape}; arguments as in `dropout`."
    op = with_first(_dropout, fn, name, about)
    return row(dropout_scales, replaces=(fn,))(op)


dropout1d = _of_channels(F.dropout1d, "(batch, channels, length)")
dropout2d = _of_channels(F.dropout2d, "(batch, channels, h, w)")
dropout3d = _of_channels(F.dropout3d, "(batch, channels, d, h, w)")


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


def _alpha(
    fn: Callable[..., Tensor], plain: Callable[..., Tensor], documentation: str
) -> Callable[..., Tensor]:
    """Adds the row of an alpha dropout, ``fn`` of torch.nn.functional and ``plain`` of torch."""
    op = with_first(_alpha_dropout, fn, fn.__name__, documentation)
    return row(alpha_dropout_scales, replaces=(fn, plain), adapters={plain: DROPOUT})(op)


alpha_dropout = _alpha(
    F.alpha_dropout,
    torch.alpha_dropout,
    """`torch.nn.functional.alpha_dropout`, for use with selu, with a unit-scaled gradient.

Raises:
    ValueError: p is outside [0, 1].
""",
)
feature_alpha_dropout = _alpha(
    F.feature_alpha_dropout,
    torch.feature_alpha_dropout,
    "`alpha_dropout` of whole channels, for input (batch, channels, ...).",
)
