"""Convolutions as products: the same three GEMMs, scales and casts as in `fp8.products.matmul`.

For casts by rows or blocks an operand is viewed as a matrix in channels-last layout: feature maps
(positions, channels), a weight (outputs, kernel positions * inputs), and the weight of a transposed
convolution (inputs, kernel positions * outputs). The forward pass and the input gradient sum over
channels, the weight gradient over positions; one-sided padding from padding="same" counts as
positions. A recipe's rotation is not applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..casts.counts import product_name
from ..casts.operands import (
    NO_STATES,
    ONES,
    Constants,
    Geometry,
    Scales,
    token_of,
)
from ..frame import FRAMES
from .active import histories, product_recipe, warn_unsummed
from .matmul import measured, simulated

Ints = int | Sequence[int]


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Scales,
    geometry: Geometry,
    unit: bool,
) -> Tensor:
    """The convolution in this form. x: with or without a batch."""
    if x.ndim == weight.ndim - 1:
        x = x.unsqueeze(0)
        return _convolve(x, weight, bias, scales, geometry, unit).squeeze(0)
    how, name = Constants(scales=scales, geometry=geometry), ""
    recipe, frame = product_recipe(unit), FRAMES.items[-1]
    if recipe is None:
        return simulated(x, weight, bias, how, NO_STATES)
    states = histories(recipe, "conv", x, weight, layer=True)
    if frame.measurement is not None:
        y = simulated(x, weight, bias, how, NO_STATES)
        return measured(frame.measurement, recipe, states, x, weight, y)
    if frame.recording or frame.block.state is None:
        name = product_name("conv", weight, recipe)
    warn_unsummed(recipe, "a convolution")
    # A rotation would not cancel: the three products do not sum over the same positions.
    how = how.changed(casts=token_of(recipe.text, rotated=False), name=name)
    return simulated(x, weight, bias, how, states)


def _each(value: Any, weight: Tensor) -> list[int]:
    """One setting for each convolved dimension; a number applies to all."""
    if isinstance(value, int):
        return [value] * (weight.ndim - 2)
    if len(value) == 1:
        return [*value] * (weight.ndim - 2)
    return [*value]


def conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: str | Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    scales: Scales = ONES,
    unit: bool = False,
) -> Tensor:
    """``s_y * conv(input, weight) + bias`` in one, two or three dimensions.

    weight: (out, in / groups, *kernel); its number of dimensions selects the convolution. The other
    arguments, and the errors for what does not fit, are the same as in
    `torch.nn.functional.conv1d`, conv2d and conv3d; scales, unit and dtypes as in
    `fp8.products.matmul.linear`. The scale is applied to the weight, so a scale that is not a power
    of two rounds the weight once more, in its own dtype. The enclosing `fp8.autocast` gives the
    recipe. Raises ValueError for a stride with padding="same".
    """
    steps, strides = _each(dilation, weight), _each(stride, weight)
    if padding == "valid":
        padding = 0
    if padding == "same":
        if any(step != 1 for step in strides):
            raise ValueError(f"padding='same' needs stride 1, got {stride!r}")
        padding, sides = [], list[int]()
        for step, size in zip(steps, weight.shape[2:], strict=True):
            total = step * (size - 1)
            padding.append(total // 2)
            # The extra element is on the right, as in torch.
            sides = [0, total % 2, *sides]
        if any(sides):
            input = F.pad(input, sides)
    margins = _each(padding, weight)
    geometry = Geometry(strides, margins, steps, False, _each(0, weight), groups)
    return _convolve(input, weight, bias, scales, geometry, unit)


def conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    scales: Scales = ONES,
    unit: bool = False,
) -> Tensor:
    """``s_y * conv_transpose(input, weight) + bias`` in one, two or three dimensions.

    weight: (in, out / groups, *kernel). The other arguments are those of
    `torch.nn.functional.conv_transpose1d`, 2d and 3d; scales and unit as in `conv`.
    """
    settings = (stride, padding, dilation, output_padding)
    steps, margins, stretch, extra = (_each(setting, weight) for setting in settings)
    geometry = Geometry(steps, margins, stretch, True, extra, groups)
    return _convolve(input, weight, bias, scales, geometry, unit)
