"""Pooling and interpolation, with the arguments of torch.nn and the keyword ``constraint``."""

from __future__ import annotations

from torch import nn

from .. import functional as U
from .scaled import Constrained

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "LPPool1d",
    "LPPool2d",
    "LPPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Upsample",
]


class AdaptiveAvgPool1d(Constrained, nn.AdaptiveAvgPool1d, op=U.adaptive_avg_pool1d):
    """`unit_scaling.functional.adaptive_avg_pool1d` as a module."""


class AdaptiveAvgPool2d(Constrained, nn.AdaptiveAvgPool2d, op=U.adaptive_avg_pool2d):
    """`unit_scaling.functional.adaptive_avg_pool2d` as a module."""


class AdaptiveAvgPool3d(Constrained, nn.AdaptiveAvgPool3d, op=U.adaptive_avg_pool3d):
    """`unit_scaling.functional.adaptive_avg_pool3d` as a module."""


class AdaptiveMaxPool1d(Constrained, nn.AdaptiveMaxPool1d, op=U.adaptive_max_pool1d):
    """`unit_scaling.functional.adaptive_max_pool1d` as a module."""


class AdaptiveMaxPool2d(Constrained, nn.AdaptiveMaxPool2d, op=U.adaptive_max_pool2d):
    """`unit_scaling.functional.adaptive_max_pool2d` as a module."""


class AdaptiveMaxPool3d(Constrained, nn.AdaptiveMaxPool3d, op=U.adaptive_max_pool3d):
    """`unit_scaling.functional.adaptive_max_pool3d` as a module."""


class AvgPool1d(Constrained, nn.AvgPool1d, op=U.avg_pool1d):
    """`unit_scaling.functional.avg_pool1d` as a module."""


class AvgPool2d(Constrained, nn.AvgPool2d, op=U.avg_pool2d):
    """`unit_scaling.functional.avg_pool2d` as a module."""


class AvgPool3d(Constrained, nn.AvgPool3d, op=U.avg_pool3d):
    """`unit_scaling.functional.avg_pool3d` as a module."""


class LPPool1d(Constrained, nn.LPPool1d, op=U.lp_pool1d):
    """`unit_scaling.functional.lp_pool1d` as a module."""


class LPPool2d(Constrained, nn.LPPool2d, op=U.lp_pool2d):
    """`unit_scaling.functional.lp_pool2d` as a module."""


class LPPool3d(Constrained, nn.LPPool3d, op=U.lp_pool3d):
    """`unit_scaling.functional.lp_pool3d` as a module."""


class MaxPool1d(Constrained, nn.MaxPool1d, op=U.max_pool1d):
    """`unit_scaling.functional.max_pool1d` as a module."""


class MaxPool2d(Constrained, nn.MaxPool2d, op=U.max_pool2d):
    """`unit_scaling.functional.max_pool2d` as a module."""


class MaxPool3d(Constrained, nn.MaxPool3d, op=U.max_pool3d):
    """`unit_scaling.functional.max_pool3d` as a module."""


class Upsample(Constrained, nn.Upsample, op=U.interpolate):
    """`unit_scaling.functional.interpolate` as a module."""
