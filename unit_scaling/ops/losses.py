"""Losses: the value that torch returns, with the gradient of the sum over the examples, scaled.

Dividing by the number of examples is part of the value only. A gradient divided by a large batch
is what loss scaling exists to undo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.table import Scales, row
from ..scale import scale_each, value_with_gradient

__all__ = ["cross_entropy", "ctc_loss", "nll_loss"]

Loss = Callable[..., Tensor]

_REDUCTIONS = ("mean", "none", "sum")


def reduction_of(
    reduction: str,
    size_average: bool | None,
    reduce: bool | None,
    allowed: Sequence[str] = _REDUCTIONS,
) -> str:
    """The reduction, with torch's two legacy arguments taken into account."""
    if reduction == "mean" and size_average is None and reduce is None:
        return reduction  # a compiled call looks no further than this
    if size_average is not None or reduce is not None:
        if reduce is False:
            return "none"
        return "sum" if size_average is False else "mean"
    if reduction not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"unknown reduction {reduction!r}; choose one of {names}")
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
    kind = reduction_of(reduction, size_average, reduce)
    scale = cross_entropy_scales(input, label_smoothing)["input"]
    logits = input if mult == 1.0 else input * mult
    if target.is_floating_point() or label_smoothing:
        loss: Loss = partial(F.cross_entropy, label_smoothing=label_smoothing)
        scores = logits
    else:  # what F.cross_entropy computes; the softmax is shared by the value and the sum
        loss = F.nll_loss
        scores = F.log_softmax(logits, _class_dim(logits))
    loss = partial(loss, weight=weight, ignore_index=ignore_index)
    return unit_loss(loss, scores, target, kind=kind, scale=scale / mult if mult else scale)


def unit_loss(loss: Loss, *operands: Tensor, kind: str, scale: float) -> Tensor:
    """``loss(*operands)`` reduced as ``kind``; the gradient is ``scale`` times the sum's."""
    if kind == "none":
        return scale_each(loss(*operands, reduction="none"), 1.0, scale)
    total = loss(*operands, reduction="sum")
    if kind == "sum":
        return scale_each(total, 1.0, scale)
    with torch.no_grad():
        value = loss(*[operand.detach() for operand in operands], reduction=kind)
    return value_with_gradient(value, total, scale)


def nll_loss_scales(input: Tensor) -> Scales:
    """The gradient of a log-probability is -1 for the class at hand and 0 for the others."""
    classes = input.shape[_class_dim(input)] if input.dim() else 1
    return {"output": 1.0, "input": float((classes or 1) ** 0.5)}


@row(nll_loss_scales, replaces=(F.nll_loss,))
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The value of `torch.nn.functional.nll_loss`, unit-scaled backward.

    input: log-probabilities (classes,), (batch, classes) or (batch, classes, ...). target, weight,
    ignore_index, the gradient and errors are as in `cross_entropy`. After `log_softmax` of c
    classes the logits' gradient is smaller than that of `cross_entropy` by sqrt(1 - 1/c).
    """
    kind = reduction_of(reduction, size_average, reduce)
    loss = partial(F.nll_loss, weight=weight, ignore_index=ignore_index)
    return unit_loss(loss, input, target, kind=kind, scale=nll_loss_scales(input)["input"])


def ctc_loss_scales(log_probs: Tensor) -> Scales:
    """Twice the factor of `cross_entropy`: the gradient is 1/V less the posterior of each class.

    With uniform probabilities the posterior of an alignment is spread over blanks and neighbouring
    labels. Counting the alignments of 1 to 500 labels with 8 to 1000 frames, the gradient has 0.2
    to 0.9 of the RMS that a single certain class would give; most often about half.
    """
    classes = log_probs.shape[-1] if log_probs.dim() else 1
    return {"output": 1.0, "log_probs": 2 * classes / math.sqrt(max(1, classes - 1))}


@row(ctc_loss_scales, replaces=(F.ctc_loss,))
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The value of `torch.nn.functional.ctc_loss`, unit-scaled backward (Graves et al. 2006).

    log_probs: (frames, batch, classes) or (frames, classes), from `log_softmax`. targets: class
    numbers, (batch, length) or one after the other. input_lengths, target_lengths: (batch,).
    The gradient is s times that of the sum of the examples' losses, for "mean" too. It is that
    of the logits: torch's is right only where a log_softmax comes before. As there, an example that
    has no alignment has the loss Inf and the gradient NaN, unless zero_infinity sets both to 0.
    Raises ValueError for an unknown reduction; other errors are torch's.
    """
    kind = reduction_of(reduction, None, None)
    scale = ctc_loss_scales(log_probs)["log_probs"]
    loss: Any = F.ctc_loss  # takes sequences too, whatever its annotations say
    lengths = (input_lengths, target_lengths)
    losses = loss(log_probs, targets, *lengths, blank, "none", zero_infinity)
    if kind == "none":
        return scale_each(losses, 1.0, scale)
    if kind == "sum":
        return scale_each(losses.sum(), 1.0, scale)
    divisors = torch.as_tensor(target_lengths).clamp_min(1).to(losses)
    return value_with_gradient((losses.detach() / divisors).mean(), losses.sum(), scale)
