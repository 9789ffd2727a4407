"""Operands with a scale for each 128 elements of a row, or for each 128 x 128 (DeepSeek-V3,
arXiv:2412.19437, section 3.3.1)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import QuantizedOperand, times
from ..formats.quantize import in_dtype
from ..recipes.cast import Cast
from ..recipes.rules import LOWERED
from .kernel import (
    ALIGNMENT,
    Kernel,
    Output,
    Scales,
    in_rows_or_squares,
    padded,
    scaled_mm,
)

SIDE = 128


def accepts(cast: Cast) -> bool:
    """Scales of rows or squares of 128, in float32 without a unit."""
    has_unit = (
        cast.stored_rule is not None and LOWERED[cast.stored_rule].unit is not None
    )
    return not has_unit and in_rows_or_squares(cast, SIDE)


def refuses(a: Cast, b: Cast) -> str:
    """torch has 1 x 128 by the same or by 128 x 128, in both orders."""
    if a.tile == b.tile == (SIDE, SIDE):
        return "no kernel multiplies tiles of 128 x 128 by the same"
    return ""


def store(operand: QuantizedOperand, cast: Cast) -> QuantizedOperand:
    """values: e4m3. scale: float32, (inner / 128, outer), or of squares (outer / 128, inner / 128
    padded to a multiple of 4)."""
    scale = operand.scale
    across, _ = cast.tile
    # A column of scales starts at a multiple of 16 bytes.
    values = padded(operand.values, SIDE, max(across, ALIGNMENT))
    if across == 1:
        missing = values.shape[0] - scale.shape[0]
        scale = F.pad(scale.mT, (0, missing), value=1.0).contiguous()
    else:
        # The stride of a column is a multiple of 4 scales, those are 16 bytes.
        missing = -scale.shape[1] % 4
        scale = F.pad(scale, (0, missing), value=1.0)
    return QuantizedOperand(in_dtype(values, cast.number_format.dtype), scale)


def multiply(a: QuantizedOperand, b: QuantizedOperand, output: Output) -> Tensor:
    """The factor is folded into the scales of a."""
    left = scales_of(a.values, times(a.scale, output.factor))
    right = scales_of(b.values, b.scale)
    # torch refuses fast sums of blocks.
    output = output._replace(fast=False)
    return scaled_mm(a.values, b.values, left, right, output)


def scales_of(values: Tensor, scale: Tensor) -> Scales:
    """The stored scales of an operand, of rows or of squares."""
    of_rows = scale.shape == (values.shape[1] // SIDE, values.shape[0])
    if of_rows:
        return Scales(scale.mT, F.ScalingType.BlockWise1x128)
    return Scales(scale.mT, F.ScalingType.BlockWise128x128)


BLOCK = Kernel(
    name="block",
    about="e4m3, a scale for each 128 of a row; one operand may have squares of 128 x 128",
    accepts=accepts,
    formats=(("e4m3", "e4m3"),),
    refuses=refuses,
    store=store,
    multiply=multiply,
    least=(9, 0),
    # torch rejects it on capabilities above Hopper.
    below=(10, 0),
    multiple=SIDE,
)
