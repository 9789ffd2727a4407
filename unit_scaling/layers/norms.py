"""Norms, with the arguments of torch.nn."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

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


class LayerNorm(Weighted, nn.LayerNorm):
    """`unit_scaling.functional.layer_norm` as a module; by default without weight and bias.

    The state_dict of an `nn.LayerNorm` loads with ``elementwise_affine=True``.
    """

    _defaults: ClassVar = {"elementwise_affine": False}


class RMSNorm(Weighted, nn.RMSNorm):
    """`unit_scaling.functional.rms_norm` as a module; by default without weight, as `LayerNorm`."""

    _defaults: ClassVar = {"elementwise_affine": False, "eps": 1e-5}

    def forward(self, input: Tensor) -> Any:
        """Returns ``op`` of the input."""
        return super().forward(input)


class _OfStatistics(Weighted):
    forward = Weighted.substituted


# fmt: off
class GroupNorm(Weighted, nn.GroupNorm): ...
class BatchNorm1d(_OfStatistics, nn.BatchNorm1d): ...
class BatchNorm2d(_OfStatistics, nn.BatchNorm2d): ...
class BatchNorm3d(_OfStatistics, nn.BatchNorm3d): ...
class InstanceNorm1d(_OfStatistics, nn.InstanceNorm1d): ...
class InstanceNorm2d(_OfStatistics, nn.InstanceNorm2d): ...
class InstanceNorm3d(_OfStatistics, nn.InstanceNorm3d): ...
