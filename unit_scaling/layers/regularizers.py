"""Dropout, gated units and other modules, with the arguments of torch.nn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import functional as U
from ..constraints import checked_constraint
from ..parameter import TaggedModule
from .scaled import Constrained, Scaled

__all__ = [
    "GLU",
    "AlphaDropout",
    "CosineSimilarity",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
    "LocalResponseNorm",
    "LogSoftmax",
    "PReLU",
    "Softmin",
]


class AlphaDropout(Constrained, nn.AlphaDropout):
    """`unit_scaling.functional.alpha_dropout` as a module; the identity in evaluation mode."""

    op = staticmethod(U.alpha_dropout)


class CosineSimilarity(Constrained, nn.CosineSimilarity):
    """`unit_scaling.functional.cosine_similarity` as a module."""

    op = staticmethod(U.cosine_similarity)


class Dropout1d(Scaled, nn.Dropout1d):
    """`unit_scaling.functional.dropout1d` as a module; the identity in evaluation mode."""

    op = staticmethod(U.dropout1d)


class Dropout2d(Scaled, nn.Dropout2d):
    """`unit_scaling.functional.dropout2d` as a module; the identity in evaluation mode."""

    op = staticmethod(U.dropout2d)


class Dropout3d(Scaled, nn.Dropout3d):
    """`unit_scaling.functional.dropout3d` as a module; the identity in evaluation mode."""

    op = staticmethod(U.dropout3d)


class FeatureAlphaDropout(Constrained, nn.FeatureAlphaDropout):
    """`unit_scaling.functional.feature_alpha_dropout` as a module."""

    op = staticmethod(U.feature_alpha_dropout)


class GLU(Constrained, nn.GLU):
    """`unit_scaling.functional.glu` as a module."""

    op = staticmethod(U.glu)


class LocalResponseNorm(Scaled, nn.LocalResponseNorm):
    """`unit_scaling.functional.local_response_norm` as a module."""

    op = staticmethod(U.local_response_norm)


class LogSoftmax(Scaled, nn.LogSoftmax):
    """`unit_scaling.functional.log_softmax` as a module."""

    op = staticmethod(U.log_softmax)


class PReLU(TaggedModule, nn.PReLU):
    """`unit_scaling.functional.prelu` as a module. The slopes are initialised with ``init``."""

    def __init__(
        self,
        num_parameters: int = 1,
        init: float = 0.25,
        device: Device = None,
        dtype: torch.dtype | None = None,
        constraint: str | None = "to_output_scale",
    ) -> None:
        super().__init__(num_parameters, init, device, dtype)
        self.constraint = checked_constraint(constraint)
        self.tag_parameters(weight="norm")

    def reset_parameters(self) -> None:
        """Sets the slopes to ``init``."""
        super().reset_parameters()
        self.restore_tags()

    def forward(self, input: Tensor) -> Tensor:
        return U.prelu(input, self.weight, self.constraint)


class Softmin(nn.Softmin):
    """`unit_scaling.functional.softmin` as a module."""

    def __init__(
        self,
        dim: int | None = None,
        mult: float = 1.0,
        constraint: str | None = "to_output_scale",
    ) -> None:
        super().__init__(dim=dim)
        self.mult = mult
        self.constraint = checked_constraint(constraint)

    def forward(self, input: Tensor) -> Tensor:
        return U.softmin(input, self.dim, constraint=self.constraint, mult=self.mult)
