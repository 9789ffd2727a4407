"""Losses between tensors of equal shape; see losses.py for their gradients."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.table import Scales, row
from ..scale import scale_each
from .activations import softmax_scales
from .losses import Loss, reduction_of, unit_loss

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
]


def _pair(input: Tensor, target: Tensor, rms: float) -> Scales:
    """1/rms for both operands; a broadcast one sums the gradients of its copies."""
    if input.shape == target.shape:
        return {"output": 1.0, "input": 1 / rms, "target": 1 / rms}
    size = math.prod(torch.broadcast_shapes(input.shape, target.shape))
    copies = [size / (t.numel() or 1) or 1.0 for t in (input, target)]
    return {
        "output": 1.0,
        "input": float((rms**2 * copies[0]) ** -0.5),
        "target": float((rms**2 * copies[1]) ** -0.5),
    }


def _difference_loss(loss: Loss, input: Tensor, target: Tensor, kind: str, s: Scales) -> Tensor:
    if s["input"] == s["target"]:
        return unit_loss(loss, input, target, kind=kind, scale=s["input"])
    input, target = (scale_each(t, 1.0, s[k]) for k, t in (("input", input), ("target", target)))
    return unit_loss(loss, input, target, kind=kind, scale=1.0)


def _weighted(loss: Loss, weight: Tensor | None) -> Loss:
    return loss if weight is None else partial(loss, weight=weight)


def _clipped_rms(limit: float) -> float:
    """The RMS of the difference of two standard normal variables, clipped to [-limit, limit].

    With t = limit / sqrt(2): 2 E[x^2; |x| < t] + limit^2 P(|x| > t).
    """
    t = limit / math.sqrt(2)
    inside = math.erf(t / math.sqrt(2)) - t * math.sqrt(2 / math.pi) * math.exp(-(t**2) / 2)
    return math.sqrt(2 * inside + limit**2 * math.erfc(t / math.sqrt(2)))


def mse_loss_scales(input: Tensor, target: Tensor) -> Scales:
    """The gradient, twice the difference of two standard normals, has RMS sqrt(8).

    A broadcast operand sums the gradients of its copies.
    """
    return _pair(input, target, 8**0.5)


@row(mse_loss_scales, replaces=(F.mse_loss,))
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.mse_loss` with a unit-scaled gradient: s times that of the sum.

    This holds for "mean" too. Legacy arguments are torch's.

    Args:
        input: floating point, broadcastable with ``target`` (torch warns if the shapes differ).
        target: floating point.
        reduction: "mean", "sum" or "none".
        weight: multiplies each squared difference.

    Raises:
        ValueError: the reduction is unknown.
    """
    kind = reduction_of(reduction, size_average, reduce)
    loss = _weighted(F.mse_loss, weight)
    return _difference_loss(loss, input, target, kind, mse_loss_scales(input, target))


def l1_loss_scales(input: Tensor, target: Tensor) -> Scales:
    """The gradient is a sign: its RMS is 1, except for broadcast operands."""
    return _pair(input, target, 1.0)


@row(l1_loss_scales, replaces=(F.l1_loss,))
def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.l1_loss` with a unit-scaled gradient; see `mse_loss`."""
    kind = reduction_of(reduction, size_average, reduce)
    loss = _weighted(F.l1_loss, weight)
    return _difference_loss(loss, input, target, kind, l1_loss_scales(input, target))


def smooth_l1_loss_scales(input: Tensor, target: Tensor, beta: float = 1.0) -> Scales:
    """The gradient is the difference of two standard normals divided by beta, clipped to [-1,
    1]."""
    return _pair(input, target, _clipped_rms(beta) / beta if beta else 1.0)


@row(smooth_l1_loss_scales, replaces=(F.smooth_l1_loss,))
def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """`torch.nn.functional.smooth_l1_loss` with a unit-scaled gradient; see `mse_loss`."""
    kind = reduction_of(reduction, size_average, reduce)
    loss = partial(F.smooth_l1_loss, beta=beta)
    return _difference_loss(loss, input, target, kind, smooth_l1_loss_scales(input, target, beta))


def huber_loss_scales(input: Tensor, target: Tensor, delta: float = 1.0) -> Scales:
    """The gradient is the difference of two standard normals, clipped to [-delta, delta]."""
    return _pair(input, target, _clipped_rms(delta) if delta > 0 else 1.0)  # torch rejects 0


@row(huber_loss_scales, replaces=(F.huber_loss,))
def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.huber_loss` with a unit-scaled gradient; see `mse_loss`."""
    kind = reduction_of(reduction, None, None)
    loss = _weighted(partial(F.huber_loss, delta=delta), weight)
    return _difference_loss(loss, input, target, kind, huber_loss_scales(input, target, delta))


def binary_cross_entropy_with_logits_scales() -> Scales:
    """The gradient at probability 1/2 is 1/2 - target, of magnitude 1/2 for a target of 0 or 1."""
    return {"output": 1.0, "input": 2.0, "target": 2.0}


@row(binary_cross_entropy_with_logits_scales, replaces=(F.binary_cross_entropy_with_logits,))
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.binary_cross_entropy_with_logits` with 2 times the gradient of the sum.

    This holds for "mean" too. Legacy arguments are torch's.

    Args:
        input: logits.
        target: probabilities of the same shape.
        weight: broadcastable, multiplies loss and gradient.
        reduction: "mean", "sum" or "none".
        pos_weight: as in torch.

    Raises:
        ValueError: the reduction is unknown.
    """
    kind = reduction_of(reduction, size_average, reduce)
    loss = partial(F.binary_cross_entropy_with_logits, weight=weight, pos_weight=pos_weight)
    scale = binary_cross_entropy_with_logits_scales()["input"]
    return unit_loss(loss, input, target, kind=kind, scale=scale)


def binary_cross_entropy_scales() -> Scales:
    """The gradient at probability 1/2 is -2 or 2, for a target of 1 or 0."""
    return {"output": 1.0, "input": 0.5, "target": 0.5}


@row(binary_cross_entropy_scales, replaces=(F.binary_cross_entropy,))
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.binary_cross_entropy` with half the gradient of the sum, for "mean" too.

    Prefer logits and `binary_cross_entropy_with_logits`. Other arguments and errors are as there.

    Args:
        input: probabilities in [0, 1]; not the scaled outputs of the unit-scaled `sigmoid`.
    """
    kind = reduction_of(reduction, size_average, reduce)
    loss = partial(F.binary_cross_entropy, weight=weight)
    scale = binary_cross_entropy_scales()["input"]
    return unit_loss(loss, input, target, kind=kind, scale=scale)


def kl_div_scales(input: Tensor) -> Scales:
    """The gradient of log-probabilities is -target: 1/RMS of a softmax over the last dimension.

    The target is assumed to be the softmax of a standard normal, with the factor of
    `softmax_scales`.
    """
    scale = softmax_scales(input, -1)["output"] if input.dim() else 1.0
    return {"output": 1.0, "input": scale, "target": scale}


@row(kl_div_scales, replaces=(F.kl_div,))
def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """`torch.nn.functional.kl_div` with s times the gradient of the sum. Legacy arguments are
    torch's.

    Args:
        input: log-probabilities, classes last.
        target: probabilities, or log-probabilities if ``log_target``.
        reduction: "mean", "sum", "none" or "batchmean".
        log_target: whether ``target`` has log-probabilities.

    Raises:
        ValueError: the reduction is unknown.
    """
    kind = reduction_of(reduction, size_average, reduce, ("mean", "none", "sum", "batchmean"))
    loss = partial(F.kl_div, log_target=log_target)
    return unit_loss(loss, input, target, kind=kind, scale=kl_div_scales(input)["input"])


def cosine_embedding_loss_scales(input1: Tensor) -> Scales:
    """The gradient of the cosine of n unit normal values has RMS 1/n: the other input over
    norms."""
    width = input1.shape[-1] if input1.dim() else 1
    return {"output": 1.0, "input1": float(width), "input2": float(width)}


@row(cosine_embedding_loss_scales, replaces=(F.cosine_embedding_loss,))
def cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.cosine_embedding_loss` with n times the gradient of the sum, for "mean"
    too.

    Legacy arguments are torch's.

    Args:
        input1: (batch, n) or (n,).
        input2: (batch, n) or (n,).
        target: 1 or -1 for each pair.
        margin: as in torch.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: the reduction is unknown.
    """
    kind = reduction_of(reduction, size_average, reduce)
    loss = partial(F.cosine_embedding_loss, margin=margin)
    scale = cosine_embedding_loss_scales(input1)["input1"]
    return unit_loss(loss, input1, input2, target, kind=kind, scale=scale)
