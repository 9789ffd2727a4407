"""NVFP4: pairs of e2m1 values with an e4m3 scale for each 16 elements of a row, and a scale of the
tensor (arXiv:2509.25149, section 2)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import QuantizedOperand, times
from ..recipes.cast import Cast
from ..recipes.rules import LOWERED
from .blackwell import of_blocks, swizzled
from .kernel import (
    Kernel,
    Output,
    Scales,
    in_rows_or_squares,
    padded,
    scaled_mm,
)

ALONG = 16

#: The values in 16 bytes.
MULTIPLE = 32


def accepts(cast: Cast) -> bool:
    """Scales of rows or squares of 16 in a unit of the tensor."""
    if cast.stored_rule is None:
        return False
    rule = LOWERED[cast.stored_rule]
    # A corrected scale needs random signs, which are simulated.
    has_unit = rule.unit is not None and rule.correct is None
    return has_unit and in_rows_or_squares(cast, ALONG)


def store(operand: QuantizedOperand, cast: Cast) -> QuantizedOperand:
    """values: uint8, `in_pairs`. scale: e4m3, `swizzled`. unit: float32, 0-dim."""
    assert operand.unit is not None
    values = padded(operand.values, MULTIPLE)
    scale = of_blocks(operand.scale, values, cast)
    # Restores the e4m3 values of the rule; a value above their range occurs only for all-zero
    # tiles.
    scale = (scale / operand.unit).clamp(max=448.0)
    scale = swizzled(scale.to(torch.float8_e4m3fn))
    return QuantizedOperand(in_pairs(values), scale, operand.unit)


def in_pairs(y: Tensor) -> Tensor:
    """Packs e2m1 values, which may be off by errors of float32, as uint8, two of a row in one; the
    first is in the lower four bits. The magnitudes 0 to 2 in steps of 0.5, 3, 4 and 6 have the
    codes 0 to 7. NaN becomes an arbitrary code."""
    m = y.abs()
    codes = torch.minimum(2 * m, m + 2)
    codes = torch.minimum(codes, m / 2 + 4)
    bits = codes.round() + 8 * y.signbit()
    pairs = bits[:, ::2] + 16 * bits[:, 1::2]
    return pairs.to(torch.uint8)


def multiply(a: QuantizedOperand, b: QuantizedOperand, output: Output) -> Tensor:
    """The factor is folded into the unit of a."""
    assert a.unit is not None
    assert b.unit is not None
    types = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    left = Scales([a.scale, times(a.unit, output.factor)], types, swizzles)
    right = Scales([b.scale, b.unit], types, swizzles)
    x = a.values.view(torch.float4_e2m1fn_x2)
    y = b.values.view(torch.float4_e2m1fn_x2)
    return scaled_mm(x, y, left, right, output)


NV = Kernel(
    name="nv",
    about="e2m1, an e4m3 scale for each 16 of a row and one of the tensor",
    accepts=accepts,
    formats=(("e2m1", "e2m1"),),
    store=store,
    multiply=multiply,
    # Blackwell.
    least=(10, 0),
    multiple=MULTIPLE,
)
