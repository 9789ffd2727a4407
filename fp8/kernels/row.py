"""Operands with a scale for each row, of which one may have a single scale."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import QuantizedOperand, times
from ..recipes.cast import Cast
from .kernel import EIGHT_BITS, Kernel, Output, Scales, scaled_mm
from .tensor import store


def accepts(cast: Cast) -> bool:
    """Scales of whole rows, or of the tensor."""
    _, along = cast.tile
    return not along


def multiply(a: QuantizedOperand, b: QuantizedOperand, output: Output) -> Tensor:
    """The factor is folded into the scales of a."""
    # Either operand may have one scale; those of the second belong to columns of its transpose.
    rows, columns = a.values.shape[0], b.values.shape[0]
    left = times(a.scale, output.factor).expand(rows, 1)
    left = left.flatten().contiguous()
    right = b.scale.expand(columns, 1).flatten().contiguous()
    kind = F.ScalingType.RowWise
    of_a = Scales(left[:, None], kind)
    of_b = Scales(right[None], kind)
    return scaled_mm(a.values, b.values, of_a, of_b, output)


ROW = Kernel(
    name="row",
    about="e4m3 or e5m2, a scale for each row, or one",
    accepts=accepts,
    formats=EIGHT_BITS,
    store=store,
    multiply=multiply,
    # Ada.
    least=(8, 9),
    cpu=True,
)
