"""Operands with a scale for each row, of which one may have a single scale."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import LoweredCast, QuantizedOperand
from .kernel import EIGHT_BITS, Kernel, Output, Scales, rows_in_memory, scaled_mm, times
from .tensor import store


def accepts(cast: LoweredCast) -> bool:
    """Scales of whole rows, or of the tensor."""
    _, along = cast.tile
    return not along


def multiply(a: QuantizedOperand, b: QuantizedOperand, output: Output) -> Tensor:
    """The factor is folded into the scales of a."""
    x, y = rows_in_memory(a), rows_in_memory(b)
    left = _of_each_row(times(a.scale, output.factor), x)
    right = _of_each_row(b.scale, y)
    kind = F.ScalingType.RowWise
    return scaled_mm(x, y, Scales(left[:, None], kind), Scales(right[None], kind), output)


def _of_each_row(scale: Tensor, values: Tensor) -> Tensor:
    """The scale of each row, of one scale or (rows, 1)."""
    return scale.expand(values.shape[0], 1).flatten().contiguous()


ROW = Kernel(
    name="row",
    about="e4m3 or e5m2, a scale for each row, or one",
    accepts=accepts,
    formats=EIGHT_BITS,
    store=store,
    multiply=multiply,
    least=(8, 9),
    cpu=True,
)
