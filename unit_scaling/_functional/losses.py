"""Losses: the value that torch returns, with the gradient of the sum over the examples, scaled.

Dividing by the number of examples is part of the value only. A gradient divided by a large batch
is what loss scaling exists to undo.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import Scales, row
from ..scale import scale_bwd, value_with_gradient

__all__ = ["cross_entropy", "mse_loss"]

Loss = Callable[..., Tensor]

_REDUCTIONS = ("mean", "none", "sum")


def _reduction(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """The reduction, with torch's two legacy arguments taken into account."""
    if size_average is not None or reduce is not None:
        if reduce is False:
            return "none"
        return "sum" if size_average is False else "mean"
    if reduction not in _REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}; choose one of 'mean', 'none', 'sum'")
    return reduction


def _class_dim(input: Tensor) -> int:
    return 0 if input.dim() == 1 else 1


def cross_entropy_scales(input: Tensor, label_smoothing: float = 0.0) -> Scales:
    """The gradient of an example's loss at uniform probabilities is 1/V - onehot.

    Its RMS over V classes is sqrt(V - 1)/V; smoothed labels multiply it by 1 - label_smoothing.
    """
    classes = input.shape[_class_dim(input)] if input.dim() else 1
    scale = classes / math.sqrt(classes - 1) if classes > 1 else 1.0
    return {"output": 1.0, "input": scale / (1 - label_smoothing) if label_smoothing < 1 else scale}


@row(cross_entropy_scales, replaces=(F.cross_entropy,))
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    mult: float = 1.0,
) -> Tensor:
    """The value of `torch.nn.functional.cross_entropy` of ``mult * input``, unit-scaled backward.

    input: logits (classes,), (batch, classes) or (batch, classes, ...). target: class numbers, or
    probabilities of the shape of input. weight: (classes,), multiplies each example's loss and
    gradient. mult: the inverse of a temperature.
    The gradient is s times that of the sum of the examples' losses, for "mean" too: an ignored
    example has none, and does not change that of the others.
    Raises ValueError for an unknown reduction; other errors are torch's.
    """
    kind = _reduction(reduction, size_average, reduce)
    scale = cross_entropy_scales(input, label_smoothing)["input"]
    logits = input if mult == 1.0 else input * mult
    if target.is_floating_point() or label_smoothing:
        loss: Loss = partial(F.cross_entropy, label_smoothing=label_smoothing)
        scores = logits
    else:  # what F.cross_entropy computes; the softmax is shared by the value and the sum
        loss = F.nll_loss
        scores = F.log_softmax(logits, _class_dim(logits))
    loss = partial(loss, weight=weight, ignore_index=ignore_index)
    return _unit_loss(loss, scores, target, kind, scale / mult if mult else scale)


def _unit_loss(loss: Loss, input: Tensor, target: Tensor, kind: str, scale: float) -> Tensor:
    """``loss(input, target)`` reduced as ``kind``; the gradient is ``scale`` times the sum's."""
    if kind == "none":
        return scale_bwd(loss(input, target, reduction="none"), scale)
    total = loss(input, target, reduction="sum")
    if kind == "sum":
        return scale_bwd(total, scale)
    with torch.no_grad():
        value = loss(input.detach(), target.detach(), reduction="mean")
    return value_with_gradient(value, total, scale)


def mse_loss_scales(input: Tensor, target: Tensor) -> Scales:
    """The difference of two unit normals, doubled by the square, has RMS sqrt(8).

    A broadcast operand collects the gradients of its copies.
    """
    size = math.prod(torch.broadcast_shapes(input.shape, target.shape))
    copies = [size / (t.numel() or 1) or 1.0 for t in (input, target)]
    return {
        "output": 1.0,
        "input": float((8 * copies[0]) ** -0.5),
        "target": float((8 * copies[1]) ** -0.5),
    }


@row(mse_loss_scales, replaces=(F.mse_loss,))
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """The value of `torch.nn.functional.mse_loss`, unit-scaled backward.

    input, target: of shapes that broadcast together (torch warns where they differ). weight:
    multiplies each squared difference. The gradient is s times that of the sum, for "mean" too.
    Raises ValueError for an unknown reduction.
    """
    kind = _reduction(reduction, size_average, reduce)
    s = mse_loss_scales(input, target)
    settings: dict[str, Any] = {} if weight is None else {"weight": weight}
    loss = partial(F.mse_loss, **settings)
    if s["input"] == s["target"]:
        return _unit_loss(loss, input, target, kind, s["input"])
    input, target = scale_bwd(input, s["input"]), scale_bwd(target, s["target"])
    return _unit_loss(loss, input, target, kind, 1.0)
