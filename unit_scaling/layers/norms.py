"""Norms, with the arguments of torch.nn."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from .. import functional as U
from .scaled import Weighted

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
]


class LayerNorm(Weighted, nn.LayerNorm, op=U.layer_norm):
    """`unit_scaling.functional.layer_norm` as a module; by default without weight and bias.

    The state_dict of an `nn.LayerNorm` loads with ``elementwise_affine=True``.
    """

    _defaults: ClassVar = {"elementwise_affine": False}


class RMSNorm(Weighted, nn.RMSNorm, op=U.rms_norm):
    """`unit_scaling.functional.rms_norm` as a module; by default without weight, as `LayerNorm`."""

    _defaults: ClassVar = {"elementwise_affine": False, "eps": 1e-5}

    def forward(self, input: Tensor) -> Any:
        """Returns ``op`` of the input."""
        return super().forward(input)


class _OfStatistics(Weighted):
    forward = Weighted.substituted


# fmt: off
class GroupNorm(Weighted, nn.GroupNorm, op=U.group_norm): ...
class BatchNorm1d(_OfStatistics, nn.BatchNorm1d, op=U.batch_norm): ...
class BatchNorm2d(_OfStatistics, nn.BatchNorm2d, op=U.batch_norm): ...
class BatchNorm3d(_OfStatistics, nn.BatchNorm3d, op=U.batch_norm): ...
class InstanceNorm1d(_OfStatistics, nn.InstanceNorm1d, op=U.instance_norm): ...
class InstanceNorm2d(_OfStatistics, nn.InstanceNorm2d, op=U.instance_norm): ...
class InstanceNorm3d(_OfStatistics, nn.InstanceNorm3d, op=U.instance_norm): ...
