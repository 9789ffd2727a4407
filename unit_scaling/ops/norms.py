"""Normalisations, with unit-scaled gradients of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8.norms.layer_norm2d import layer_norm2d as over_channels

from ..common.constant import constant
from ..rules.batch import row_scale
from ..rules.quadrature import absolute_moment, largest_square
from ..rules.table import Adapter, Scales, positional, row, tie
from ..scale import scale_each
from .generated import CONSTRAINT, REQUIRED, P, by_name, defaults_of, described, unary


def layer_norm_scales(input: Tensor, normalized_shape: Sequence[int]) -> Scales:
    """The output has RMS 1; gradients of weight and bias sum over all rows."""
    scale = row_scale(input.numel() // (math.prod(normalized_shape) or 1), 0.5)
    return {"output": 1.0, "input": 1.0, "weight": scale, "bias": scale}


def rms_norm_scales(input: Tensor, normalized_shape: Sequence[int]) -> Scales:
    """As `layer_norm_scales`."""
    s = layer_norm_scales(input, normalized_shape)
    return {"output": 1.0, "input": 1.0, "weight": s["weight"]}


def channel_norm_scales(input: Tensor) -> Scales:
    """The output has RMS 1; the weight of a channel sums gradients over all other dimensions."""
    channels = input.shape[1] if input.ndim > 1 else 1
    scale = row_scale(input.numel() // (channels or 1), 0.5)
    return {"output": 1.0, "input": 1.0, "weight": scale, "bias": scale}


def _norm(
    fn: Callable[P, Tensor],
    rule: Callable[..., Scales],
    about: str,
    adapters: Mapping[Callable[..., Any], Adapter],
) -> Callable[P, Tensor]:
    """Adds the row of a norm: the gradients of its weight and bias are scaled.

    about: the docstring. adapters: as in `Op`.
    """
    name, theirs = fn.__name__, cast("Callable[..., Tensor]", fn)
    arguments = {**defaults_of(fn), "eps": 1e-5}
    names, by_shape = tuple(arguments)[1:], "normalized_shape" in arguments

    def norm(input: Tensor, *args: Any, **named: Any) -> Tensor:
        bound = {"eps": 1e-5, **by_name(name, names, args, named)}
        s = rule(input, bound["normalized_shape"]) if by_shape else rule(input)
        for parameter in ("weight", "bias"):
            if bound.get(parameter) is not None:
                bound[parameter] = scale_each(bound[parameter], 1.0, s["weight"])
        return theirs(input, **bound)

    described(norm, name, about, arguments, fn)
    replaces = () if fn in adapters else (fn,)
    return cast("Callable[P, Tensor]", row(rule, replaces=replaces, adapters=adapters)(norm))


def _of_torch(name: str, arguments: str) -> dict[Callable[..., Any], Adapter]:
    """torch's norm with these arguments and a last one about cuDNN."""
    adapter = positional(f"{arguments} cudnn_enabled", cudnn_enabled=None, cudnn_enable=None)
    return {getattr(torch, name): adapter}


_RMS = positional("input normalized_shape weight eps", {"eps": None})
_CHANNELS = positional("input weight bias eps", {"eps": 1e-6})
_STATISTICS = "input weight bias running_mean running_var {} momentum eps"

layer_norm = _norm(
    F.layer_norm,
    layer_norm_scales,
    """`torch.nn.functional.layer_norm` with unit-scaled gradients of weight and bias.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: the trailing dimensions to normalise.
        weight: of shape ``normalized_shape``, or None.
        bias: of shape ``normalized_shape``, or None.
        eps: added to the variance.
    """,
    _of_torch("layer_norm", "input normalized_shape weight bias eps"),
)
rms_norm = _norm(
    F.rms_norm,
    rms_norm_scales,
    """`torch.nn.functional.rms_norm` with a unit-scaled gradient of the weight.

    Other arguments are as in `layer_norm`.

    Args:
        eps: added to the mean square; None is the machine epsilon of the dtype, torch's default.
    """,
    dict.fromkeys((F.rms_norm, torch.rms_norm), _RMS),
)
group_norm = _norm(
    F.group_norm,
    channel_norm_scales,
    """`torch.nn.functional.group_norm` with unit-scaled gradients of weight and bias.

    Args:
        input: (batch, channels, ...).
        num_groups: the number of groups that channels are divided into.
        weight: (channels,) or None.
        bias: (channels,) or None.
        eps: added to the variance.
    """,
    _of_torch("group_norm", "input num_groups weight bias eps"),
)
batch_norm = _norm(
    F.batch_norm,
    channel_norm_scales,
    """`torch.nn.functional.batch_norm` with unit-scaled gradients of weight and bias.

    Other arguments are as in `group_norm`.

    Args:
        running_mean: (channels,) or None; updated in place if training, otherwise used.
        running_var: as ``running_mean``.
        training: whether to normalise with the statistics of the batch.
        momentum: the weight of the batch in the running statistics.
    """,
    _of_torch("batch_norm", _STATISTICS.format("training")),
)
instance_norm = _norm(
    F.instance_norm,
    channel_norm_scales,
    """`torch.nn.functional.instance_norm` with unit-scaled gradients of weight and bias.

    Arguments are as in `batch_norm`; ``use_input_stats`` is its ``training``.
    """,
    _of_torch("instance_norm", _STATISTICS.format("use_input_stats")),
)
layer_norm2d = _norm(
    over_channels,
    channel_norm_scales,
    """`layer_norm` over the channels of each pixel, as in ConvNeXt.

    Strides are those of `fp8.norms.layer_norm2d.layer_norm2d`. Other arguments are as in
    `group_norm`.

    Raises:
        ValueError: the input has fewer than two dimensions.
    """,
    {over_channels: _CHANNELS},
)


def local_response_norm_scales(alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Scales:
    """For standard normal input, the divisor is about (k + alpha)**beta."""
    scale = (k + alpha) ** beta
    return {"output": scale, "input": scale}


local_response_norm = unary(
    F.local_response_norm,
    local_response_norm_scales,
    "Computes ``s * local_response_norm(input, size)`` for input (batch, channels, ...).",
    {"size": REQUIRED, "alpha": 1e-4, "beta": 0.75, "k": 1.0},
)


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


normalize = unary(
    F.normalize,
    normalize_scales,
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
    """,
    {"p": 2.0, "dim": 1, "eps": 1e-12, **CONSTRAINT},
)
