"""Layer normalisation and RMS normalisation, with unit-scaled gradients of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.batch import row_scale
from ..rules.table import Scales, positional, row
from ..scale import scale_each

__all__ = ["layer_norm", "rms_norm"]


def layer_norm_scales(input: Tensor, normalized_shape: Sequence[int]) -> Scales:
    """The output has RMS 1; gradients of weight and bias sum over all rows."""
    scale = row_scale(input.numel() // (math.prod(normalized_shape) or 1), 0.5)
    return {"output": 1.0, "input": 1.0, "weight": scale, "bias": scale}


@row(
    layer_norm_scales,
    replaces=(F.layer_norm, torch.layer_norm),
    adapters={
        torch.layer_norm: positional(
            "input normalized_shape weight bias eps cudnn_enable", cudnn_enable=None
        )
    },
)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """`torch.nn.functional.layer_norm` with unit-scaled gradients of weight and bias.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: the trailing dimensions to normalise.
        weight: of shape ``normalized_shape``, or None.
        bias: of shape ``normalized_shape``, or None.
        eps: added to the variance.
    """
    s = layer_norm_scales(input, normalized_shape)
    weight = None if weight is None else scale_each(weight, 1.0, s["weight"])
    bias = None if bias is None else scale_each(bias, 1.0, s["bias"])
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm_scales(input: Tensor, normalized_shape: Sequence[int]) -> Scales:
    """As `layer_norm_scales`."""
    s = layer_norm_scales(input, normalized_shape)
    return {"output": 1.0, "input": 1.0, "weight": s["weight"]}


@row(
    rms_norm_scales,
    adapters=dict.fromkeys(
        (F.rms_norm, torch.rms_norm),
        positional("input normalized_shape weight eps", {"eps": None}),
    ),
)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = 1e-05,
) -> Tensor:
    """`torch.nn.functional.rms_norm` with a unit-scaled gradient of the weight.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: the trailing dimensions to normalise.
        weight: of shape ``normalized_shape``, or None.
        eps: added to the mean square; None is the machine epsilon of the dtype, torch's default.
    """
    s = rms_norm_scales(input, normalized_shape)
    weight = None if weight is None else scale_each(weight, 1.0, s["weight"])
    return F.rms_norm(input, list(normalized_shape), weight, eps)
