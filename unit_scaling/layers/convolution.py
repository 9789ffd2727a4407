"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .scaled import Product

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
]


class _Convolution(Product):
    def forward(self: Any, input: Tensor) -> Any:
        """Pads ``input``, if not with zeros, and returns ``op`` of it."""
        # torch pads such input in its forward; 0.3.5 pads it twice, to 66 for 64.
        run = super().forward if self.padding_mode == "zeros" else self.substituted
        return run(input)


class _Transposed(Product):
    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Any:
        """Returns ``op`` of the input, of the requested size."""
        if output_size is None:
            return super().forward(input)
        return self.substituted(input, output_size)


class Conv1d(_Convolution, nn.Conv1d):
    """`unit_scaling.functional.conv1d` as a module.

    Input is (batch, in_channels, length) or (in_channels, length). Initial values, ``constraint``,
    ``weight_mup_type`` and the default of ``bias`` are as in `Linear`, other arguments as in
    `torch.nn.Conv1d`, including padding "same" and "valid". The same holds for the other
    convolutions.
    """


# fmt: off
class Conv2d(_Convolution, nn.Conv2d): ...
class Conv3d(_Convolution, nn.Conv3d): ...
class ConvTranspose1d(_Transposed, nn.ConvTranspose1d): ...
class ConvTranspose2d(_Transposed, nn.ConvTranspose2d): ...
class ConvTranspose3d(_Transposed, nn.ConvTranspose3d): ...
