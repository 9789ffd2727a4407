"""Normalisations, with unit-scaled gradients of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.calls import P
from ..rules.batch import row_scale
from ..rules.table import Scales, positional, row
from ..scale import scale_each
from .generated import by_name, defaults_of, described


def layer_norm_scales(input: Tensor, normalized_shape: Sequence[int]) -> Scales:
    """The output has RMS 1; gradients of weight and bias sum over all rows."""
    return _scales(input, math.prod(normalized_shape))


def _scales(input: Tensor, elements: int) -> Scales:
    """elements: those of the weight."""
    scale = row_scale(input.numel() // (elements or 1))
    return {"output": 1.0, "input": 1.0, "weight": scale, "bias": scale}


def rms_norm_scales(input: Tensor, normalized_shape: Sequence[int]) -> Scales:
    """Returns the scales of `layer_norm_scales`, without those of a bias."""
    scales = layer_norm_scales(input, normalized_shape)
    del scales["bias"]
    return scales


def channel_norm_scales(input: Tensor) -> Scales:
    """The output has RMS 1; the weight of a channel sums gradients over all other dimensions."""
    return _scales(input, math.prod(input.shape[1:2]))


def _norm(
    fn: Callable[P, Tensor],
    rule: Callable[..., Scales],
    about: str,
    order: str,
    **defaults: Any,
) -> Callable[P, Tensor]:
    """Adds the row of a norm: the gradients of its weight and bias are scaled.

    about: the docstring. order: the arguments of the function of ``torch``, to which a last one
    about cuDNN is added. defaults: defaults of both functions of torch that differ from the op's.
    """
    name = fn.__name__
    theirs = cast("Callable[..., Tensor]", fn)
    # The default of 0.3.5, also for rms_norm, whose default in torch follows from the dtype.
    arguments = {**defaults_of(fn), "eps": 1e-5}
    names = tuple(arguments)[1:]
    by_shape = "normalized_shape" in arguments

    def norm(input: Tensor, *args: Any, **named: Any) -> Tensor:
        bound = {"eps": 1e-5, **by_name(name, names, args, named)}
        s = rule(input, bound["normalized_shape"]) if by_shape else rule(input)
        for parameter in ("weight", "bias"):
            if bound.get(parameter) is not None:
                bound[parameter] = scale_each(bound[parameter], 1.0, s["weight"])
        return theirs(input, **bound)

    described(norm, name, about, arguments, fn)
    adapter = positional(
        f"{order} cudnn_enabled", defaults, cudnn_enabled="", cudnn_enable=""
    )
    adapters = {getattr(torch, name): adapter}
    if defaults:
        adapters[fn] = adapter
    return cast(
        "Callable[P, Tensor]", row(rule, replaces=(fn,), adapters=adapters)(norm)
    )


_STATISTICS = "input weight bias running_mean running_var {} momentum eps"

layer_norm = _norm(
    F.layer_norm,
    layer_norm_scales,
    """`torch.nn.functional.layer_norm` with unit-scaled gradients of weight and bias.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: the trailing dimensions to normalise.
        weight, bias: of shape ``normalized_shape``, or None.
        eps: added to the variance.
    """,
    "input normalized_shape weight bias eps",
)
rms_norm = _norm(
    F.rms_norm,
    rms_norm_scales,
    """`torch.nn.functional.rms_norm` with a unit-scaled gradient of the weight.

    Arguments are as in `layer_norm`; an ``eps`` of None is the machine epsilon of the dtype.
    """,
    "input normalized_shape weight eps",
    eps=None,
)
group_norm = _norm(
    F.group_norm,
    channel_norm_scales,
    """`torch.nn.functional.group_norm` with unit-scaled gradients of weight and bias.

    Args:
        input: (batch, channels, ...).
        num_groups: the number of groups that channels are divided into.
        weight, bias: (channels,) or None.
        eps: added to the variance.
    """,
    "input num_groups weight bias eps",
)
batch_norm = _norm(
    F.batch_norm,
    channel_norm_scales,
    """`torch.nn.functional.batch_norm` with unit-scaled gradients of weight and bias.

    Other arguments are as in `group_norm`.

    Args:
        running_mean, running_var: (channels,) or None; updated in place if training, else used.
        training: whether to normalise with the statistics of the batch.
        momentum: the weight of the batch in the running statistics.
    """,
    _STATISTICS.format("training"),
)
instance_norm = _norm(
    F.instance_norm,
    channel_norm_scales,
    """`torch.nn.functional.instance_norm` with unit-scaled gradients of weight and bias.

    Arguments are as in `batch_norm`; ``use_input_stats`` is its ``training``.
    """,
    _STATISTICS.format("use_input_stats"),
)
