"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional as U
from .scaled import Product

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


class _Convolution(Product):
    def forward(self: Any, input: Tensor) -> Any:
        """Pads ``input``, if not with zeros, and returns ``op`` of it."""
        if self.padding_mode == "zeros":
            return super().forward(input)
        padded = F.pad(input, _margins(self), mode=self.padding_mode)
        return super().forward(padded, padding=0)


class _Transposed(Product):
    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Any:
        """Returns ``op`` of the input, of the requested size."""
        if output_size is None:
            return super().forward(input)
        return super().forward(input, output_padding=_output_padding(self, input, output_size))


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


class Conv1d(_Convolution, nn.Conv1d, op=U.conv1d):
    """`unit_scaling.functional.conv1d` as a module.

    Input is (batch, in_channels, length) or (in_channels, length). The weight is initialised with a
    standard normal, the bias with zero. Other arguments are those of `torch.nn.Conv1d`, including
    padding "same" and "valid".

    Args:
        constraint: see `Linear`.
        weight_mup_type: see `Linear`.
    """


class Conv2d(_Convolution, nn.Conv2d, op=U.conv2d):
    """`unit_scaling.functional.conv2d` as a module; arguments as in `Conv1d`.

    Input is (batch, in_channels, height, width), or without batch.
    """


class Conv3d(_Convolution, nn.Conv3d, op=U.conv3d):
    """`unit_scaling.functional.conv3d` as a module; arguments as in `Conv1d`.

    Input is (batch, in_channels, depth, height, width), or without batch.
    """


class ConvTranspose1d(_Transposed, nn.ConvTranspose1d, op=U.conv_transpose1d):
    """`unit_scaling.functional.conv_transpose1d` as a module.

    Input is (batch, in_channels, length), or without batch. Other arguments are those of
    `torch.nn.ConvTranspose1d`.

    Args:
        constraint: see `Linear`.
        weight_mup_type: see `Linear`.
    """


class ConvTranspose2d(_Transposed, nn.ConvTranspose2d, op=U.conv_transpose2d):
    """`unit_scaling.functional.conv_transpose2d` as a module; arguments as in `ConvTranspose1d`.

    Input is (batch, in_channels, height, width), or without batch.
    """


class ConvTranspose3d(_Transposed, nn.ConvTranspose3d, op=U.conv_transpose3d):
    """`unit_scaling.functional.conv_transpose3d` as a module; arguments as in `ConvTranspose1d`.

    Input is (batch, in_channels, depth, height, width), or without batch.
    """
