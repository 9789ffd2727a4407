"""Losses between tensors of equal shape; see losses.py for their gradients."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from ..rules.table import Scales
from .broadcast import shares
from .losses import loss_row
from .softmax import softmax_scales

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
    same = input.shape == target.shape
    first, second = (1.0, 1.0) if same else shares(input, target)
    return {"output": 1.0, "input": first / rms, "target": second / rms}


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


mse_loss = loss_row(
    F.mse_loss,
    mse_loss_scales,
    """`torch.nn.functional.mse_loss` with a unit-scaled gradient: s times that of the sum.

    This holds for "mean" too. Legacy arguments are torch's.

    Args:
        input: floating point, broadcastable with ``target`` (torch warns if the shapes differ).
        target: floating point.
        reduction: "mean", "sum" or "none".
        weight: multiplies each squared difference.

    Raises:
        ValueError: the reduction is unknown.
    """,
)


def l1_loss_scales(input: Tensor, target: Tensor) -> Scales:
    """The gradient is a sign: its RMS is 1, except for broadcast operands."""
    return _pair(input, target, 1.0)


l1_loss = loss_row(
    F.l1_loss,
    l1_loss_scales,
    """`torch.nn.functional.l1_loss` with a unit-scaled gradient; see `mse_loss`.""",
)


def smooth_l1_loss_scales(input: Tensor, target: Tensor, beta: float = 1.0) -> Scales:
    """The gradient is the difference of two standard normals divided by beta, clipped to [-1,
    1]."""
    return _pair(input, target, _clipped_rms(beta) / beta if beta else 1.0)


smooth_l1_loss = loss_row(
    F.smooth_l1_loss,
    smooth_l1_loss_scales,
    """`torch.nn.functional.smooth_l1_loss` with a unit-scaled gradient; see `mse_loss`.""",
)


def huber_loss_scales(input: Tensor, target: Tensor, delta: float = 1.0) -> Scales:
    """The gradient is the difference of two standard normals, clipped to [-delta, delta]."""
    return _pair(input, target, _clipped_rms(delta) if delta > 0 else 1.0)  # torch rejects 0


huber_loss = loss_row(
    F.huber_loss,
    huber_loss_scales,
    """`torch.nn.functional.huber_loss` with a unit-scaled gradient; see `mse_loss`.""",
)


def binary_cross_entropy_with_logits_scales() -> Scales:
    """The gradient at probability 1/2 is 1/2 - target, of magnitude 1/2 for a target of 0 or 1."""
    return {"output": 1.0, "input": 2.0, "target": 2.0}


binary_cross_entropy_with_logits = loss_row(
    F.binary_cross_entropy_with_logits,
    binary_cross_entropy_with_logits_scales,
    """`torch.nn.functional.binary_cross_entropy_with_logits` with 2 times the gradient of the sum.

    Other arguments and errors are as in `mse_loss`.

    Args:
        input: logits.
        target: probabilities of the same shape.
        weight: broadcastable, multiplies loss and gradient.
        pos_weight: as in torch.
    """,
)


def binary_cross_entropy_scales() -> Scales:
    """The gradient at probability 1/2 is -2 or 2, for a target of 1 or 0."""
    return {"output": 1.0, "input": 0.5, "target": 0.5}


binary_cross_entropy = loss_row(
    F.binary_cross_entropy,
    binary_cross_entropy_scales,
    """`torch.nn.functional.binary_cross_entropy` with half the gradient of the sum, for "mean" too.

    Prefer logits and `binary_cross_entropy_with_logits`. Other arguments and errors are as there.

    Args:
        input: probabilities in [0, 1]; not the scaled outputs of the unit-scaled `sigmoid`.
    """,
)


def kl_div_scales(input: Tensor) -> Scales:
    """The gradient of log-probabilities is -target: 1/RMS of a softmax over the last dimension.

    The target is assumed to be the softmax of a standard normal, with the factor of
    `softmax_scales`.
    """
    scale = softmax_scales(input, -1)["output"] if input.ndim else 1.0
    return {"output": 1.0, "input": scale, "target": scale}


kl_div = loss_row(
    F.kl_div,
    kl_div_scales,
    """`torch.nn.functional.kl_div` with s times the gradient of the sum.

    Other arguments and errors are as in `mse_loss`.

    Args:
        input: log-probabilities, classes last.
        target: probabilities, or log-probabilities if ``log_target``.
        reduction: "mean", "sum", "none" or "batchmean".
        log_target: whether ``target`` has log-probabilities.
    """,
    ("mean", "none", "sum", "batchmean"),
)


def cosine_embedding_loss_scales(input1: Tensor) -> Scales:
    """The gradient of the cosine of n unit normal values has RMS 1/n: the other input over
    norms."""
    width = input1.shape[-1] if input1.ndim else 1
    return {"output": 1.0, "input1": float(width), "input2": float(width)}


cosine_embedding_loss = loss_row(
    F.cosine_embedding_loss,
    cosine_embedding_loss_scales,
    """`torch.nn.functional.cosine_embedding_loss` with n times the gradient of the sum, for "mean"
    too.

    Other arguments and errors are as in `mse_loss`.

    Args:
        input1: (batch, n) or (n,).
        input2: (batch, n) or (n,).
        target: 1 or -1 for each pair.
        margin: as in torch.
    """,
)
