"""Losses with torch's value and the scaled gradient of the sum over examples."""

from __future__ import annotations

from torch import nn

from .. import functional as U
from .scaled import Scaled

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


class BCELoss(Scaled, nn.BCELoss):
    """`unit_scaling.functional.binary_cross_entropy` as a module."""

    op = staticmethod(U.binary_cross_entropy)


class BCEWithLogitsLoss(Scaled, nn.BCEWithLogitsLoss):
    """`unit_scaling.functional.binary_cross_entropy_with_logits` as a module."""

    op = staticmethod(U.binary_cross_entropy_with_logits)


class CTCLoss(Scaled, nn.CTCLoss):
    """`unit_scaling.functional.ctc_loss` as a module."""

    op = staticmethod(U.ctc_loss)


class CosineEmbeddingLoss(Scaled, nn.CosineEmbeddingLoss):
    """`unit_scaling.functional.cosine_embedding_loss` as a module."""

    op = staticmethod(U.cosine_embedding_loss)


class HuberLoss(Scaled, nn.HuberLoss):
    """`unit_scaling.functional.huber_loss` as a module."""

    op = staticmethod(U.huber_loss)


class KLDivLoss(Scaled, nn.KLDivLoss):
    """`unit_scaling.functional.kl_div` as a module."""

    op = staticmethod(U.kl_div)


class L1Loss(Scaled, nn.L1Loss):
    """`unit_scaling.functional.l1_loss` as a module."""

    op = staticmethod(U.l1_loss)


class MSELoss(Scaled, nn.MSELoss):
    """`unit_scaling.functional.mse_loss` as a module."""

    op = staticmethod(U.mse_loss)


class NLLLoss(Scaled, nn.NLLLoss):
    """`unit_scaling.functional.nll_loss` as a module."""

    op = staticmethod(U.nll_loss)


class SmoothL1Loss(Scaled, nn.SmoothL1Loss):
    """`unit_scaling.functional.smooth_l1_loss` as a module."""

    op = staticmethod(U.smooth_l1_loss)
