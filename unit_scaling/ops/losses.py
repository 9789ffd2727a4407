"""Losses with torch's value and the scaled gradient of the sum over examples.

Division by the number of examples applies only to the value. A gradient divided by a large batch
size would need loss scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8.common.validation import check_name

from ..common.calls import Kwargs, P
from ..rules.table import Scales, row
from ..scale import scale_each, value_with_gradient
from .activations import softmax_scales
from .arithmetic import shares

_REDUCTIONS = ("mean", "none", "sum")

_ABOUT = "`torch.nn.functional.{name}` with a unit-scaled gradient; see `mse_loss`."


def _loss_row(
    theirs: Callable[P, Tensor],
    rule: Callable[..., Scales],
    documentation: str = _ABOUT,
    allowed: Sequence[str] = _REDUCTIONS,
) -> Callable[P, Tensor]:
    """Adds a loss to `OPS`, with the name, arguments and value of torch's loss ``theirs``, and the
    gradients of the sum over examples, times the factors of ``rule``."""
    arguments = signature(theirs)
    read = signature(rule).parameters

    @wraps(theirs)
    def loss(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        bound = arguments.bind(*args, **kwargs).arguments
        s = rule(**{name: bound[name] for name in read if name in bound})
        return _unit_loss(theirs, bound, s, allowed)

    loss.__module__ = rule.__module__
    loss.__doc__ = documentation.format(name=theirs.__name__)
    return row(rule, replaces=(theirs,))(loss)


def _unit_loss(
    loss: Callable[..., Tensor],
    arguments: Kwargs,
    s: Scales,
    allowed: Sequence[str] = _REDUCTIONS,
) -> Tensor:
    kind = arguments.pop("reduction", "mean")
    size_average = arguments.pop("size_average", None)
    reduce = arguments.pop("reduce", None)
    if reduce is False:
        kind = "none"
    elif size_average is False:
        kind = "sum"
    elif size_average or reduce:
        kind = "mean"
    elif kind not in allowed:  # compiled code guards on a call
        check_name("reduction", kind, allowed)
    _, scale, *others = s.values()
    if any(other != scale for other in others):
        scaled = {n: scale_each(arguments[n], 1.0, s[n]) for n in s if n != "output"}
        arguments = {**arguments, **scaled}
        scale = 1.0
    if kind in ("none", "sum"):
        return scale_each(loss(**arguments, reduction=kind), 1.0, scale)
    total = loss(**arguments, reduction="sum")
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = value.detach()
    # torch's own mean: with 75 % of examples ignored, 0.3.5 has a quarter of the loss.
    with torch.no_grad():
        value = loss(**arguments, reduction=kind)
    return value_with_gradient(value, total, scale)


def _classes(input: Tensor) -> int:
    """The number of classes: the size of the only dimension, or of the second."""
    return math.prod(input.shape[:2][-1:])


def cross_entropy_scales(input: Tensor, label_smoothing: float = 0.0) -> Scales:
    """At uniform probabilities, the gradient of an example's loss is 1/V - onehot.

    Its RMS over V classes is sqrt(V - 1)/V; label smoothing multiplies it by 1 - label_smoothing.
    """
    classes = _classes(input)
    scale = 1.0
    if classes > 1:
        scale = classes / math.sqrt(classes - 1)
    if label_smoothing < 1:
        scale /= 1 - label_smoothing
    return {"output": 1.0, "input": scale}


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

    The gradient is s times the gradient of the sum of the examples' losses, for "mean" too: ignored
    examples do not change the gradients of others. Other arguments are torch's.

    Args:
        input: logits, (classes,), (batch, classes) or (batch, classes, ...).
        target: class indices, or probabilities of the shape of ``input``.
        mult: the inverse of a temperature.

    Raises:
        ValueError: the reduction is unknown.
    """
    s = cross_entropy_scales(input, label_smoothing)
    if mult != 1.0:
        input = input * mult
        s["input"] /= mult or 1.0
    arguments: Kwargs = {
        "input": input,
        "target": target,
        "weight": weight,
        "size_average": size_average,
        "ignore_index": ignore_index,
        "reduce": reduce,
        "reduction": reduction,
    }
    if target.dtype.is_floating_point or label_smoothing:
        arguments["label_smoothing"] = label_smoothing
        return _unit_loss(F.cross_entropy, arguments, s)
    # F.cross_entropy in two steps: value and sum share the softmax.
    arguments["input"] = F.log_softmax(input, int(input.ndim != 1))
    return _unit_loss(F.nll_loss, arguments, s)


def nll_loss_scales(input: Tensor) -> Scales:
    """The gradient of log-probabilities is -1 for the target class and 0 for others."""
    return {"output": 1.0, "input": float((_classes(input) or 1) ** 0.5)}


nll_loss = _loss_row(
    F.nll_loss,
    nll_loss_scales,
    """`torch.nn.functional.nll_loss` of log-probabilities, with a unit-scaled gradient.

    Arguments, the gradient and errors are as in `cross_entropy`. After `log_softmax` of c classes
    the gradient of the logits is smaller than under `cross_entropy` by sqrt(1 - 1/c).
    """,
)


# Losses between tensors of equal shape


def _pair(input: Tensor, target: Tensor, rms: float) -> Scales:
    """1/rms for both operands; a broadcast one sums the gradients of its copies."""
    first, second = shares(input, target)
    return {"output": 1.0, "input": first / rms, "target": second / rms}


def _clipped_rms(limit: float) -> float:
    """The RMS of the difference of two standard normal variables, clipped to [-limit, limit].

    With t = limit / sqrt(2): 2 E[x^2; |x| < t] + limit^2 P(|x| > t).
    """
    t = limit / math.sqrt(2)
    density = math.exp(-(t**2) / 2)
    inside = math.erf(t / math.sqrt(2)) - t * math.sqrt(2 / math.pi) * density
    return math.sqrt(2 * inside + limit**2 * math.erfc(t / math.sqrt(2)))


def mse_loss_scales(input: Tensor, target: Tensor) -> Scales:
    """The gradient, twice the difference of two standard normals, has RMS sqrt(8)."""
    return _pair(input, target, 8**0.5)


mse_loss = _loss_row(
    F.mse_loss,
    mse_loss_scales,
    """`torch.nn.functional.mse_loss` with a unit-scaled gradient: s times the gradient of the
    sum, for "mean" too.

    Arguments are torch's. Raises ValueError for an unknown reduction.
    """,
)


def l1_loss_scales(input: Tensor, target: Tensor) -> Scales:
    """The gradient is a sign: its RMS is 1, except for broadcast operands."""
    return _pair(input, target, 1.0)


l1_loss = _loss_row(F.l1_loss, l1_loss_scales)


def smooth_l1_loss_scales(input: Tensor, target: Tensor, beta: float = 1.0) -> Scales:
    """The gradient is the difference of two standard normals over beta, clipped to [-1, 1]."""
    return _pair(input, target, _clipped_rms(beta) / beta if beta else 1.0)


smooth_l1_loss = _loss_row(F.smooth_l1_loss, smooth_l1_loss_scales)


def huber_loss_scales(input: Tensor, target: Tensor, delta: float = 1.0) -> Scales:
    """The gradient is the difference of two standard normals, clipped to [-delta, delta]."""
    # Torch rejects 0.
    return _pair(input, target, _clipped_rms(delta) if delta > 0 else 1.0)


huber_loss = _loss_row(F.huber_loss, huber_loss_scales)


def binary_cross_entropy_with_logits_scales() -> Scales:
    """The gradient at probability 1/2 is 1/2 - target, of magnitude 1/2 for a target of 0 or 1."""
    return {"output": 1.0, "input": 2.0, "target": 2.0}


binary_cross_entropy_with_logits = _loss_row(
    F.binary_cross_entropy_with_logits, binary_cross_entropy_with_logits_scales
)


def binary_cross_entropy_scales() -> Scales:
    """The gradient at probability 1/2 is -2 or 2, for a target of 1 or 0."""
    return {"output": 1.0, "input": 0.5, "target": 0.5}


binary_cross_entropy = _loss_row(
    F.binary_cross_entropy,
    binary_cross_entropy_scales,
    """`torch.nn.functional.binary_cross_entropy` with half the gradient of the sum; see `mse_loss`.

    The input are probabilities, not the scaled outputs of the unit-scaled `sigmoid`.
    """,
)


def kl_div_scales(input: Tensor) -> Scales:
    """The gradient of log-probabilities is -target, which is assumed to be the softmax of a
    standard normal over the last dimension: the factor of `softmax_scales`."""
    scale = softmax_scales(input, -1)["output"] if input.ndim else 1.0
    return {"output": 1.0, "input": scale, "target": scale}


kl_div = _loss_row(
    F.kl_div,
    kl_div_scales,
    """`torch.nn.functional.kl_div` of log-probabilities, classes last, with s times the gradient of
    the sum; see `mse_loss`. reduction: "batchmean" too.
    """,
    ("mean", "none", "sum", "batchmean"),
)
