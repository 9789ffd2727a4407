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


class AdaptiveAvgPool1d(Constrained, nn.AdaptiveAvgPool1d):
    """`unit_scaling.functional.adaptive_avg_pool1d` as a module."""

    op = staticmethod(U.adaptive_avg_pool1d)


class AdaptiveAvgPool2d(Constrained, nn.AdaptiveAvgPool2d):
    """`unit_scaling.functional.adaptive_avg_pool2d` as a module."""

    op = staticmethod(U.adaptive_avg_pool2d)


class AdaptiveAvgPool3d(Constrained, nn.AdaptiveAvgPool3d):
    """`unit_scaling.functional.adaptive_avg_pool3d` as a module."""

    op = staticmethod(U.adaptive_avg_pool3d)


class AdaptiveMaxPool1d(Constrained, nn.AdaptiveMaxPool1d):
    """`unit_scaling.functional.adaptive_max_pool1d` as a module."""

    op = staticmethod(U.adaptive_max_pool1d)


class AdaptiveMaxPool2d(Constrained, nn.AdaptiveMaxPool2d):
    """`unit_scaling.functional.adaptive_max_pool2d` as a module."""

    op = staticmethod(U.adaptive_max_pool2d)


class AdaptiveMaxPool3d(Constrained, nn.AdaptiveMaxPool3d):
    """`unit_scaling.functional.adaptive_max_pool3d` as a module."""

    op = staticmethod(U.adaptive_max_pool3d)


class AvgPool1d(Constrained, nn.AvgPool1d):
    """`unit_scaling.functional.avg_pool1d` as a module."""

    op = staticmethod(U.avg_pool1d)


class AvgPool2d(Constrained, nn.AvgPool2d):
    """`unit_scaling.functional.avg_pool2d` as a module."""

    op = staticmethod(U.avg_pool2d)


class AvgPool3d(Constrained, nn.AvgPool3d):
    """`unit_scaling.functional.avg_pool3d` as a module."""

    op = staticmethod(U.avg_pool3d)


class LPPool1d(Constrained, nn.LPPool1d):
    """`unit_scaling.functional.lp_pool1d` as a module."""

    op = staticmethod(U.lp_pool1d)


class LPPool2d(Constrained, nn.LPPool2d):
    """`unit_scaling.functional.lp_pool2d` as a module."""

    op = staticmethod(U.lp_pool2d)


class LPPool3d(Constrained, nn.LPPool3d):
    """`unit_scaling.functional.lp_pool3d` as a module."""

    op = staticmethod(U.lp_pool3d)


class MaxPool1d(Constrained, nn.MaxPool1d):
    """`unit_scaling.functional.max_pool1d` as a module."""

    op = staticmethod(U.max_pool1d)


class MaxPool2d(Constrained, nn.MaxPool2d):
    """`unit_scaling.functional.max_pool2d` as a module."""

    op = staticmethod(U.max_pool2d)


class MaxPool3d(Constrained, nn.MaxPool3d):
    """`unit_scaling.functional.max_pool3d` as a module."""

    op = staticmethod(U.max_pool3d)


class Upsample(Constrained, nn.Upsample):
    """`unit_scaling.functional.interpolate` as a module."""

    op = staticmethod(U.interpolate)
