"""Normalisations, with unit-scaled gradients of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8.norms.layer_norm2d import layer_norm2d as over_channels

from ..common.constant import constant
from ..rules.batch import row_scale
from ..rules.quadrature import absolute_moment, largest_square
from ..rules.table import Adapter, Scales, positional, row, tie
from ..scale import scale_each, scale_output


def _scaled(s: Scales, *parameters: Tensor | None) -> list[Tensor | None]:
    """Weight and bias, with the factor of their gradients."""
    return [None if p is None else scale_each(p, 1.0, s["weight"]) for p in parameters]


def layer_norm_scales(input: Tensor, normalized_shape: Sequence[int]) -> Scales:
    """The output has RMS 1; gradients of weight and bias sum over all rows."""
    scale = row_scale(input.numel() // (math.prod(normalized_shape) or 1), 0.5)
    return {"output": 1.0, "input": 1.0, "weight": scale, "bias": scale}


def _form(arguments: str) -> Adapter:
    """The adapter of torch's norm with these arguments and a last one about cuDNN."""
    return positional(f"{arguments} cudnn_enabled", cudnn_enabled=None, cudnn_enable=None)


_ROWS = {torch.layer_norm: _form("input normalized_shape weight bias eps")}


@row(layer_norm_scales, replaces=(F.layer_norm,), adapters=_ROWS)
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
    weight, bias = _scaled(layer_norm_scales(input, normalized_shape), weight, bias)
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm_scales(input: Tensor, normalized_shape: Sequence[int]) -> Scales:
    """As `layer_norm_scales`."""
    s = layer_norm_scales(input, normalized_shape)
    return {"output": 1.0, "input": 1.0, "weight": s["weight"]}


_RMS = positional("input normalized_shape weight eps", {"eps": None})


@row(rms_norm_scales, adapters=dict.fromkeys((F.rms_norm, torch.rms_norm), _RMS))
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
    (weight,) = _scaled(rms_norm_scales(input, normalized_shape), weight)
    return F.rms_norm(input, list(normalized_shape), weight, eps)


# Over channels, groups and batches


def channel_norm_scales(input: Tensor) -> Scales:
    """The output has RMS 1; the weight of a channel sums gradients over all other dimensions."""
    channels = input.shape[1] if input.ndim > 1 else 1
    scale = row_scale(input.numel() // (channels or 1), 0.5)
    return {"output": 1.0, "input": 1.0, "weight": scale, "bias": scale}


_GROUPS = {torch.group_norm: _form("input num_groups weight bias eps")}


@row(channel_norm_scales, replaces=(F.group_norm,), adapters=_GROUPS)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.group_norm` with unit-scaled gradients of weight and bias.

    Args:
        input: (batch, channels, ...).
        num_groups: the number of groups that channels are divided into.
        weight: (channels,) or None.
        bias: (channels,) or None.
        eps: added to the variance.
    """
    weight, bias = _scaled(channel_norm_scales(input), weight, bias)
    return F.group_norm(input, num_groups, weight, bias, eps)


_STATISTICS = "input weight bias running_mean running_var {} momentum eps"
_BATCH = {torch.batch_norm: _form(_STATISTICS.format("training"))}
_INSTANCE = {torch.instance_norm: _form(_STATISTICS.format("use_input_stats"))}


@row(channel_norm_scales, replaces=(F.batch_norm,), adapters=_BATCH)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm` with unit-scaled gradients of weight and bias.

    Args:
        input: (batch, channels, ...).
        running_mean: (channels,) or None; updated in place if training, otherwise used.
        running_var: as ``running_mean``.
        weight: (channels,) or None.
        bias: (channels,) or None.
        training: whether to normalise with the statistics of the batch.
        momentum: the weight of the batch in the running statistics.
        eps: added to the variance.
    """
    weight, bias = _scaled(channel_norm_scales(input), weight, bias)
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@row(channel_norm_scales, replaces=(F.instance_norm,), adapters=_INSTANCE)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.instance_norm` with unit-scaled gradients of weight and bias.

    Arguments are as in `batch_norm`; ``use_input_stats`` is its ``training``.
    """
    weight, bias = _scaled(channel_norm_scales(input), weight, bias)
    return F.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


_CHANNELS = {over_channels: positional("input weight bias eps", {"eps": 1e-6})}


@row(channel_norm_scales, adapters=_CHANNELS)
def layer_norm2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`layer_norm` over the channels of each pixel, as in ConvNeXt.

    Strides are those of `fp8.norms.layer_norm2d.layer_norm2d`.

    Args:
        input: (batch, channels, ...).
        weight: (channels,) or None.
        bias: (channels,) or None.
        eps: added to the variance.

    Raises:
        ValueError: the input has fewer than two dimensions.
    """
    weight, bias = _scaled(channel_norm_scales(input), weight, bias)
    return over_channels(input, weight, bias, eps)


def local_response_norm_scales(alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Scales:
    """For standard normal input, the divisor is about (k + alpha)**beta."""
    scale = (k + alpha) ** beta
    return {"output": scale, "input": scale}


@row(local_response_norm_scales, replaces=(F.local_response_norm,))
def local_response_norm(
    input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """Computes ``s * local_response_norm(input, size)`` for input (batch, channels, ...)."""
    scale = local_response_norm_scales(alpha, beta, k)["output"]
    return F.local_response_norm(input, size, alpha, beta, k) * scale


def normalize_scales(
    input: Tensor,
    p: float = 2.0,
    dim: int | Sequence[int] = 1,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """The p-norm of n standard normal values, about sqrt(n) for p = 2.

    For other p it is (n E|x|^p)^(1/p); for p = inf the RMS of the largest of n magnitudes.
    """
    if not p > 0:
        raise ValueError(f"normalize needs p above 0: got {p}")
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    size = max(1, math.prod([input.shape[d] for d in dims])) if input.ndim else 1
    if p == math.inf:
        norm = math.sqrt(constant(largest_square, 2 * size))
    else:
        norm = (size * absolute_moment(p)) ** (1 / p)
    return tie(constraint, output=norm, input=norm)


@row(normalize_scales, replaces=(F.normalize,))
def normalize(
    input: Tensor,
    p: float = 2.0,
    dim: int | Sequence[int] = 1,
    eps: float = 1e-12,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Computes ``s * input / norm(input)``: vectors along ``dim`` of norm s, which is about
    sqrt(n).

    Args:
        input: any shape, floating point.
        p: the exponent of the norm, above 0.
        dim: the dimension or dimensions of the vectors.
        eps: the smallest divisor.
        constraint: see `unit_scaling.constraints`.

    Raises:
        ValueError: p is not above 0.
    """
    s = normalize_scales(input, p, dim, constraint)
    output = F.normalize(input, p, dim, eps)  # type: ignore[arg-type]
    return scale_output(output, s["output"], s["input"])
