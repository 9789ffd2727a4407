"""Operands with one scale each, of all of their elements."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import QuantizedOperand, times
from ..formats.quantize import in_dtype
from ..recipes.cast import Cast
from .kernel import EIGHT_BITS, Kernel, Output, Scales, scaled_mm


def accepts(cast: Cast) -> bool:
    """One scale, by any rule or static."""
    return cast.tile == (0, 0)


def store(operand: QuantizedOperand, cast: Cast) -> QuantizedOperand:
    """values: in an FP8 dtype. scale: float32, 0-dim, or (outer, 1) for rows."""
    values = operand.values
    dtype = cast.number_format.dtype
    if cast.is_plain:
        # Inf is NaN already in graphs, which have no labels.
        return QuantizedOperand(values.to(dtype), operand.scale)
    return QuantizedOperand(in_dtype(values, dtype), operand.scale)


def multiply(a: QuantizedOperand, b: QuantizedOperand, output: Output) -> Tensor:
    """The factor is folded into the scale of a."""
    kind = F.ScalingType.TensorWise
    left = Scales(times(a.scale, output.factor), kind)
    return scaled_mm(a.values, b.values, left, Scales(b.scale, kind), output)


TENSOR = Kernel(
    name="tensor",
    about="e4m3 or e5m2, one scale",
    accepts=accepts,
    formats=EIGHT_BITS,
    store=store,
    multiply=multiply,
    # Ada, the first with FP8.
    least=(8, 9),
    cpu=True,
)
