"""Losses with torch's value and the scaled gradient of the sum over examples."""

from __future__ import annotations

from torch import nn

from .. import functional as U
from .scaled import MULT, Scaled

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


class BCELoss(Scaled, nn.BCELoss, op=U.binary_cross_entropy):
    """`unit_scaling.functional.binary_cross_entropy` as a module."""


class BCEWithLogitsLoss(Scaled, nn.BCEWithLogitsLoss, op=U.binary_cross_entropy_with_logits):
    """`unit_scaling.functional.binary_cross_entropy_with_logits` as a module."""


class CTCLoss(Scaled, nn.CTCLoss, op=U.ctc_loss):
    """`unit_scaling.functional.ctc_loss` as a module."""


class CosineEmbeddingLoss(Scaled, nn.CosineEmbeddingLoss, op=U.cosine_embedding_loss):
    """`unit_scaling.functional.cosine_embedding_loss` as a module."""


class CrossEntropyLoss(Scaled, nn.CrossEntropyLoss, op=U.cross_entropy):
    """`unit_scaling.functional.cross_entropy` as a module."""

    _first = (MULT,)


class HuberLoss(Scaled, nn.HuberLoss, op=U.huber_loss):
    """`unit_scaling.functional.huber_loss` as a module."""


class KLDivLoss(Scaled, nn.KLDivLoss, op=U.kl_div):
    """`unit_scaling.functional.kl_div` as a module."""


class L1Loss(Scaled, nn.L1Loss, op=U.l1_loss):
    """`unit_scaling.functional.l1_loss` as a module."""


class MSELoss(Scaled, nn.MSELoss, op=U.mse_loss):
    """`unit_scaling.functional.mse_loss` as a module."""


class NLLLoss(Scaled, nn.NLLLoss, op=U.nll_loss):
    """`unit_scaling.functional.nll_loss` as a module."""


class SmoothL1Loss(Scaled, nn.SmoothL1Loss, op=U.smooth_l1_loss):
    """`unit_scaling.functional.smooth_l1_loss` as a module."""
