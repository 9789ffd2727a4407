"""Dropout, gated units and other modules, with the arguments of torch.nn."""

from __future__ import annotations

from torch import nn

from .. import functional as U
from .scaled import CONSTRAINT, MULT, Constrained, Scaled, Weighted

__all__ = [
    "GLU",
    "AlphaDropout",
    "CosineSimilarity",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
    "LocalResponseNorm",
    "LogSoftmax",
    "PReLU",
    "Softmax",
    "Softmin",
]


class AlphaDropout(Constrained, nn.AlphaDropout, op=U.alpha_dropout):
    """`unit_scaling.functional.alpha_dropout` as a module; the identity in evaluation mode."""


class CosineSimilarity(Constrained, nn.CosineSimilarity, op=U.cosine_similarity):
    """`unit_scaling.functional.cosine_similarity` as a module."""


class Dropout(Scaled, nn.Dropout, op=U.dropout):
    """`unit_scaling.functional.dropout` as a module; the identity in evaluation mode."""


class Dropout1d(Scaled, nn.Dropout1d, op=U.dropout1d):
    """`unit_scaling.functional.dropout1d` as a module; the identity in evaluation mode."""


class Dropout2d(Scaled, nn.Dropout2d, op=U.dropout2d):
    """`unit_scaling.functional.dropout2d` as a module; the identity in evaluation mode."""


class Dropout3d(Scaled, nn.Dropout3d, op=U.dropout3d):
    """`unit_scaling.functional.dropout3d` as a module; the identity in evaluation mode."""


class FeatureAlphaDropout(Constrained, nn.FeatureAlphaDropout, op=U.feature_alpha_dropout):
    """`unit_scaling.functional.feature_alpha_dropout` as a module."""


class GLU(Constrained, nn.GLU, op=U.glu):
    """`unit_scaling.functional.glu` as a module."""


class LocalResponseNorm(Scaled, nn.LocalResponseNorm, op=U.local_response_norm):
    """`unit_scaling.functional.local_response_norm` as a module."""


class LogSoftmax(Scaled, nn.LogSoftmax, op=U.log_softmax):
    """`unit_scaling.functional.log_softmax` as a module."""


class PReLU(Weighted, nn.PReLU, op=U.prelu):
    """`unit_scaling.functional.prelu` as a module. The slopes are initialised with ``init``."""

    _last = (CONSTRAINT,)


class Softmax(Scaled, nn.Softmax, op=U.softmax):
    """`unit_scaling.functional.softmax` as a module."""

    _last = (MULT, CONSTRAINT)


class Softmin(Scaled, nn.Softmin, op=U.softmin):
    """`unit_scaling.functional.softmin` as a module."""

    _last = (MULT, CONSTRAINT)
