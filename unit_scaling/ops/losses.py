"""Losses with torch's value and the scaled gradient of the sum over examples.

Division by the number of examples applies only to the value. A gradient divided by a large batch
size would need loss scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.table import Scales, row
from ..scale import scale_each, value_with_gradient

__all__ = ["cross_entropy", "ctc_loss", "nll_loss"]

P = ParamSpec("P")

_REDUCTIONS = ("mean", "none", "sum")


def _reduction_of(
    reduction: str,
    size_average: bool | None,
    reduce: bool | None,
    allowed: Sequence[str] = _REDUCTIONS,
) -> str:
    """The reduction, considering torch's two legacy arguments."""
    if size_average is not None or reduce is not None:
        if reduce is False:
            return "none"
        return "sum" if size_average is False else "mean"
    if reduction not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"unknown reduction {reduction!r}; choose one of {names}")
    return reduction


def loss_row(
    theirs: Callable[P, Tensor],
    rule: Callable[..., Scales],
    documentation: str,
    allowed: Sequence[str] = _REDUCTIONS,
) -> Callable[P, Tensor]:
    """Adds a loss to `OPS`, with the name, arguments and value of torch's loss ``theirs``.

    Its gradients are those of the sum over examples, times the factors of ``rule``, whatever the
    reduction.
    """
    arguments, read = signature(theirs), signature(rule).parameters

    @wraps(theirs)
    def loss(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        given = arguments.bind(*args, **kwargs).arguments
        s = rule(**{name: given[name] for name in read if name in given})
        return _unit_loss(theirs, given, s, allowed)

    loss.__module__, loss.__doc__ = rule.__module__, documentation
    return row(rule, replaces=(theirs,))(loss)


def _unit_loss(
    loss: Callable[..., Tensor],
    given: dict[str, Any],
    s: Scales,
    allowed: Sequence[str] = _REDUCTIONS,
) -> Tensor:
    """Returns ``loss(**given)`` with the gradients of the sum, times the factors."""
    legacy = given.pop("size_average", None), given.pop("reduce", None)
    kind = _reduction_of(given.pop("reduction", "mean"), *legacy, allowed)
    _, scale, *others = s.values()
    if any(other != scale for other in others):
        scaled = {name: scale_each(given[name], 1.0, s[name]) for name in s if name != "output"}
        given, scale = {**given, **scaled}, 1.0
    if kind == "none":
        return scale_each(loss(**given, reduction="none"), 1.0, scale)
    total = loss(**given, reduction="sum")
    if kind == "sum":
        return scale_each(total, 1.0, scale)
    constants = {k: v.detach() if isinstance(v, Tensor) else v for k, v in given.items()}
    with torch.no_grad():
        value = loss(**constants, reduction=kind)
    return value_with_gradient(value, total, scale)


def _class_dim(input: Tensor) -> int:
    return 0 if input.ndim == 1 else 1


def cross_entropy_scales(input: Tensor, label_smoothing: float = 0.0) -> Scales:
    """At uniform probabilities, the gradient of an example's loss is 1/V - onehot.

    Its RMS over V classes is sqrt(V - 1)/V; label smoothing multiplies it by 1 - label_smoothing.
    """
    classes = input.shape[_class_dim(input)] if input.ndim else 1
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
    """`torch.nn.functional.cross_entropy` of ``mult * input``, with a unit-scaled gradient.

    The gradient is s times that of the sum of the examples' losses, for "mean" too: ignored
    examples do not change the gradients of others. Legacy arguments are torch's.

    Args:
        input: logits, (classes,), (batch, classes) or (batch, classes, ...).
        target: class indices, or probabilities of the shape of ``input``.
        weight: (classes,), multiplies the loss and gradient of each example.
        ignore_index: the class index of ignored examples.
        reduction: "mean", "sum" or "none".
        label_smoothing: as in torch.
        mult: the inverse of a temperature.

    Raises:
        ValueError: the reduction is unknown.
    """
    scale = cross_entropy_scales(input, label_smoothing)["input"]
    logits = input if mult == 1.0 else input * mult
    given: dict[str, Any] = {
        "target": target,
        "weight": weight,
        "size_average": size_average,
        "ignore_index": ignore_index,
        "reduce": reduce,
        "reduction": reduction,
    }
    s = {"output": 1.0, "input": scale / mult if mult else scale}
    if target.dtype.is_floating_point or label_smoothing:
        given |= {"input": logits, "label_smoothing": label_smoothing}
        return _unit_loss(F.cross_entropy, given, s)
    # As F.cross_entropy; value and sum share the softmax.
    scores = F.log_softmax(logits, _class_dim(logits))
    return _unit_loss(F.nll_loss, {**given, "input": scores}, s)


def nll_loss_scales(input: Tensor) -> Scales:
    """The gradient with respect to log-probabilities is -1 for the target class and 0 for
    others."""
    classes = input.shape[_class_dim(input)] if input.ndim else 1
    return {"output": 1.0, "input": float((classes or 1) ** 0.5)}


nll_loss = loss_row(
    F.nll_loss,
    nll_loss_scales,
    """`torch.nn.functional.nll_loss` with a unit-scaled gradient.

    Other arguments, the gradient and errors are as in `cross_entropy`. After `log_softmax` of c
    classes the gradient of the logits is smaller than that of `cross_entropy` by sqrt(1 - 1/c).

    Args:
        input: log-probabilities, (classes,), (batch, classes) or (batch, classes, ...).
    """,
)


def ctc_loss_scales(log_probs: Tensor) -> Scales:
    """Twice the factor of `cross_entropy`: the gradient is 1/V minus the posterior of each class.

    For uniform probabilities, the posterior of an alignment is spread over blanks and adjacent
    labels. Over all alignments of 1 to 500 labels with 8 to 1000 frames, the gradient has 0.2 to
    0.9 of the RMS for a single certain class, most often about half.
    """
    classes = log_probs.shape[-1] if log_probs.ndim else 1
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
    """`torch.nn.functional.ctc_loss` with a unit-scaled gradient.

    The gradient is s times that of the sum of the examples' losses, for "mean" too. It is the
    gradient of the logits: as in torch, it is correct only after a log_softmax. An example without
    an alignment has loss Inf and gradient NaN, unless ``zero_infinity`` sets both to 0.

    Args:
        log_probs: (frames, batch, classes) or (frames, classes), from `log_softmax`.
        targets: class indices, (batch, length) or concatenated.
        input_lengths: (batch,).
        target_lengths: (batch,).
        blank: the class index of the blank.
        reduction: "mean", "sum" or "none".
        zero_infinity: whether to zero infinite losses and their gradients.

    Raises:
        ValueError: the reduction is unknown.

    Source: Graves et al. 2006.
    """
    kind = _reduction_of(reduction, None, None)
    scale = ctc_loss_scales(log_probs)["log_probs"]
    loss: Any = F.ctc_loss  # accepts sequences, unlike its annotation
    lengths = (input_lengths, target_lengths)
    losses = loss(log_probs, targets, *lengths, blank, "none", zero_infinity)
    if kind == "none":
        return scale_each(losses, 1.0, scale)
    if kind == "sum":
        return scale_each(losses.sum(), 1.0, scale)
    divisors = torch.as_tensor(target_lengths).clamp_min(1).to(losses)
    return value_with_gradient((losses.detach() / divisors).mean(), losses.sum(), scale)
