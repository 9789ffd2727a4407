"""The table of kernels, and the choice among them: by the casts of operands, and by the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..casts.casting import QuantizedOperand, one_scale, quantized, times
from ..casts.counts import Label
from ..common.compiler import in_memory
from ..recipes.cast import Cast
from .block import BLOCK
from .kernel import Kernel, Output, filled
from .mx import MX
from .nv import NV
from .row import ROW
from .tensor import TENSOR

#: Name -> kernel. An operand is stored by the first row that accepts its cast; a later row that
#: accepts it too reads that layout. `fp8.kernels.selftest` tests the kernels of a device.
KERNELS: dict[str, Kernel] = {row.name: row for row in (TENSOR, ROW, BLOCK, MX, NV)}

HIGH = "high"
"""The kind of a product whose operands both stay in high precision: torch's own."""


def kernel_of(a: Cast | None, b: Cast | None) -> tuple[str, str]:
    """The kernel (or HIGH) for operands under these casts, and ""; or "" and why there is none."""
    if a is None and b is None:
        return HIGH, ""
    if a is None or b is None:
        return "", "one operand of a product stays in high precision"
    if "random" in (a.signs, b.signs):
        return "", "random signs of a rotation are simulated"
    for cast in (a, b):
        if cast.is_simulated:
            return (
                "",
                f"rule {cast.rule!r} reads more than the largest magnitude of a tile",
            )
    layouts = layout_of(a), layout_of(b)
    if "" in layouts:
        cast = b if layouts[0] else a
        return "", "no kernel has tiles of {} x {} by rule {!r}".format(
            *cast.tile, cast.rule
        )
    rows = [row for row in KERNELS.values() if row.accepts(a) and row.accepts(b)]
    if not rows:
        return "", "no kernel multiplies scales by {} by scales by {}".format(
            *sorted(layouts)
        )
    whys = [row.why_not_pair(a, b) for row in rows]
    if "" in whys:
        return rows[whys.index("")].name, ""
    return "", whys[0]


def layout_of(cast: Cast) -> str:
    """The kernel in whose layout an operand under this cast is stored; "" for none."""
    for name, row in KERNELS.items():
        if row.accepts(cast):
            return name
    return ""


def why_not_kernel(kind: str, device: torch.device) -> str:
    """Why ``device`` is not expected to have a kernel of KERNELS, or HIGH; "" if it is."""
    if kind == HIGH:
        return ""
    return KERNELS[kind].why_not_on(device)


def store(
    x: Tensor,
    cast: Cast | None,
    axis: int = -1,
    history: Tensor | None = None,
    record: bool = False,
    label: Label = "",
    scale: Tensor | None = None,
) -> QuantizedOperand:
    """`quantized` of the matrix ``x`` in the layout of a kernel, under a cast that `kernel_of`
    supports; ``x``, or with axis -2 its transpose, without a cast. Operands with scales by tiles
    are padded with zeros to the sizes that the kernel needs."""
    if cast is None:
        if axis != -1:
            x = x.mT
        return QuantizedOperand(x.detach(), one_scale(x))
    operand = quantized(
        x, cast, axis, history, record, converts=True, label=label, scale=scale
    )
    return KERNELS[layout_of(cast)].store(operand, cast)


def multiply(
    kind: str,
    a: QuantizedOperand,
    b: QuantizedOperand,
    factor: float,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """``factor * a b^T`` in ``dtype``, of stored operands, by a kernel of KERNELS or, for HIGH, by
    torch. fast: as `Recipe.fast_sums`."""
    if kind == HIGH:
        product = torch.mm(a.values.to(dtype), b.values.to(dtype).mT)
        return times(product, factor)
    a = a._replace(values=in_memory(filled(a.values)))
    b = b._replace(values=in_memory(filled(b.values)))
    return KERNELS[kind].multiply(a, b, Output(factor, dtype, fast))
