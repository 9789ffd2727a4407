"""MXFP8: e4m3 operands with an e8m0 scale for each 32 elements of a row (OCP Microscaling Formats
specification 1.0)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import QuantizedOperand, times
from ..formats.quantize import in_dtype
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

ALONG = 32


def accepts(cast: Cast) -> bool:
    """Scales of rows or squares of 32 that are powers of two: e8m0 has no other values."""
    is_power = cast.stored_rule is not None and LOWERED[cast.stored_rule].form.is_power
    return is_power and in_rows_or_squares(cast, ALONG)


def store(operand: QuantizedOperand, cast: Cast) -> QuantizedOperand:
    """values: e4m3. scale: e8m0, `swizzled`."""
    values = padded(operand.values, ALONG)
    scale = of_blocks(operand.scale, values, cast)
    scale = swizzled(scale.to(torch.float8_e8m0fnu))
    return QuantizedOperand(in_dtype(values, cast.number_format.dtype), scale)


def multiply(a: QuantizedOperand, b: QuantizedOperand, output: Output) -> Tensor:
    """The factor multiplies the result, as e8m0 scales have no room for it."""
    how = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    left = Scales(a.scale, *how)
    right = Scales(b.scale, *how)
    result = scaled_mm(a.values, b.values, left, right, output)
    return times(result, output.factor)


MX = Kernel(
    name="mx",
    about="e4m3, an e8m0 scale for each 32 of a row",
    accepts=accepts,
    # Not e2m1: when compiling, torch 2.13 expects half the number of scales for packed values.
    formats=(("e4m3", "e4m3"),),
    store=store,
    multiply=multiply,
    # Blackwell.
    least=(10, 0),
    multiple=ALONG,
)
