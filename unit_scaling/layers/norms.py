"""Norms over channels, groups and batches, with the arguments and defaults of torch.nn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from fp8.norms import norm

from .. import functional as U
from ..parameter import TaggedModule
from .scaled import Scaled

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm2d",
]


class _Norm(Scaled, TaggedModule):
    """A norm whose weight, if any, is initialised with one, and its bias with zero."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag_parameters(weight="norm", bias="bias")

    def reset_parameters(self) -> None:
        """Sets the weight to one, the bias to zero, and the running statistics to 0 and 1."""
        super().reset_parameters()  # type: ignore[misc]
        self.restore_tags()


class GroupNorm(_Norm, nn.GroupNorm):
    """`unit_scaling.functional.group_norm` as a module."""

    op = staticmethod(U.group_norm)


class _BatchNorm(_Norm):
    op = staticmethod(U.batch_norm)

    def forward(self: Any, input: Tensor) -> Tensor:
        """As in torch: uses batch statistics in training, otherwise running statistics if there are
        any.
        """
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # cumulative average
                momentum = 1.0 / float(self.num_batches_tracked)
        read = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if read else (None, None)
        batch = self.training or (self.running_mean is None and self.running_var is None)
        return U.batch_norm(input, mean, var, self.weight, self.bias, batch, momentum, self.eps)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`unit_scaling.functional.batch_norm` as a module, for (batch, channels[, length])."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`unit_scaling.functional.batch_norm` as a module, for (batch, channels, height, width)."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`unit_scaling.functional.batch_norm` as a module, for (batch, channels, depth, height,
    width).
    """


class _InstanceNorm(_Norm):
    op = staticmethod(U.instance_norm)
    #: The number of dimensions of an input without a batch.
    unbatched: int

    def forward(self: Any, input: Tensor) -> Tensor:
        """As in torch: uses statistics of each image, or tracked running statistics in
        evaluation."""
        self._check_input_dim(input)
        batch = input if input.dim() != self.unbatched else input[None]
        output = U.instance_norm(
            batch,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )
        return output if batch is input else output[0]


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`unit_scaling.functional.instance_norm` as a module, for (batch, channels, length)."""

    unbatched = 2


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`unit_scaling.functional.instance_norm` as a module, for (batch, channels, height, width)."""

    unbatched = 3


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`unit_scaling.functional.instance_norm` as a module, for (batch, channels, depth, h, w)."""

    unbatched = 4


class LayerNorm2d(_Norm, norm.LayerNorm2d):
    """`unit_scaling.functional.layer_norm2d` as a module: normalises over the channels of each
    pixel.

    Input and output are (batch, num_channels, ...).

    Args:
        num_channels: the number of channels.
        eps: added to the variance.
        affine: whether to have a weight and a bias, each (num_channels,).
        bias: whether to have a bias, if ``affine``.
        device: of the parameters.
        dtype: of the parameters.
    """

    op = staticmethod(U.layer_norm2d)

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, eps, affine, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Any:
        """Normalises ``input``. Raises ValueError for another number of channels."""
        self.check_channels(input)
        return super().forward(input)
