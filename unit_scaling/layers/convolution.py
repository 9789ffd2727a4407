"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.types import Device

from .. import functional as U
from ..constraints import checked_constraint
from ..parameter import MupType, TaggedModule
from .linear import reset_weight_and_bias

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

_Sizes = int | tuple[int, ...]
"""One number for all dimensions, or one for each."""


class _Weighted(TaggedModule):
    """Base of all convolutions. ``self`` is also the torch module of the same name."""

    def _keep(self, constraint: str | None, weight_mup_type: MupType) -> None:
        self.constraint = checked_constraint(constraint)
        self.tag_parameters(weight=weight_mup_type, bias="bias")

    def reset_parameters(self) -> None:
        """Initialises the weight with a standard normal and the bias with zero."""
        reset_weight_and_bias(self)


class _Convolution(_Weighted):
    """The constructor of convolutions: torch's arguments, followed by ours."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Sizes,
        stride: _Sizes = 1,
        padding: str | _Sizes = 0,
        dilation: _Sizes = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        constraint: str | None = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self._keep(constraint, weight_mup_type)


class _Transposed(_Weighted):
    """The constructor of transposed convolutions: torch's arguments, followed by ours."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Sizes,
        stride: _Sizes = 1,
        padding: _Sizes = 0,
        output_padding: _Sizes = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: _Sizes = 1,
        padding_mode: str = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        constraint: str | None = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device,
            dtype,
        )
        self._keep(constraint, weight_mup_type)


def _convolve(module: Any, function: Any, input: Tensor) -> Tensor:
    padding = module.padding
    if module.padding_mode != "zeros":
        input, padding = F.pad(input, _margins(module), mode=module.padding_mode), 0
    return function(
        input,
        module.weight,
        module.bias,
        module.stride,
        padding,
        module.dilation,
        module.groups,
        module.constraint,
    )


def _margins(module: Any) -> list[int]:
    """The padding for `F.pad`, last dimension first; an odd element of "same" is on the right."""
    sides = []
    for i in reversed(range(len(module.kernel_size))):
        if module.padding == "valid":
            sides += [0, 0]
        elif module.padding == "same":
            total = module.dilation[i] * (module.kernel_size[i] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [int(module.padding[i])] * 2
    return sides


def _transpose(module: Any, function: Any, input: Tensor, output_size: list[int] | None) -> Tensor:
    output_padding = module.output_padding
    if output_size is not None:
        output_padding = _output_padding(module, input, output_size)
    return function(
        input,
        module.weight,
        module.bias,
        module.stride,
        module.padding,
        output_padding,
        module.groups,
        module.dilation,
        module.constraint,
    )


def _output_padding(module: Any, input: Tensor, output_size: list[int]) -> list[int]:
    """The output padding for a requested output size. Raises ValueError if there is none."""
    dims = len(module.kernel_size)
    wanted, sizes = output_size[-dims:], input.shape[-dims:]
    least = [
        (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
        for size, stride, padding, dilation, kernel in zip(
            sizes, module.stride, module.padding, module.dilation, module.kernel_size, strict=True
        )
    ]
    extra = [w - low for w, low in zip(wanted, least, strict=False)]
    allowed = [max(s, d) for s, d in zip(module.stride, module.dilation, strict=True)]
    if len(wanted) != dims or any(not 0 <= e < a for e, a in zip(extra, allowed, strict=True)):
        most = [low + a - 1 for low, a in zip(least, allowed, strict=True)]
        raise ValueError(f"output_size must be between {least} and {most}, got {list(wanted)}")
    return extra


class Conv1d(_Convolution, nn.Conv1d):
    """`unit_scaling.functional.conv1d` as a module.

    Input is (batch, in_channels, length) or (in_channels, length). The weight is initialised with a
    standard normal, the bias with zero. Other arguments are those of `torch.nn.Conv1d`, including
    padding "same" and "valid".

    Args:
        constraint: see `Linear`.
        weight_mup_type: see `Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _convolve(self, U.conv1d, input)


class Conv2d(_Convolution, nn.Conv2d):
    """`unit_scaling.functional.conv2d` as a module; arguments as in `Conv1d`.

    Input is (batch, in_channels, height, width), or without batch.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _convolve(self, U.conv2d, input)


class Conv3d(_Convolution, nn.Conv3d):
    """`unit_scaling.functional.conv3d` as a module; arguments as in `Conv1d`.

    Input is (batch, in_channels, depth, height, width), or without batch.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _convolve(self, U.conv3d, input)


class ConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """`unit_scaling.functional.conv_transpose1d` as a module.

    Input is (batch, in_channels, length), or without batch. Other arguments are those of
    `torch.nn.ConvTranspose1d`.

    Args:
        constraint: see `Linear`.
        weight_mup_type: see `Linear`.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return _transpose(self, U.conv_transpose1d, input, output_size)


class ConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """`unit_scaling.functional.conv_transpose2d` as a module; arguments as in `ConvTranspose1d`.

    Input is (batch, in_channels, height, width), or without batch.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return _transpose(self, U.conv_transpose2d, input, output_size)


class ConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """`unit_scaling.functional.conv_transpose3d` as a module; arguments as in `ConvTranspose1d`.

    Input is (batch, in_channels, depth, height, width), or without batch.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return _transpose(self, U.conv_transpose3d, input, output_size)
