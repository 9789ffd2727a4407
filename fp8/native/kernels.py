"""What torch's scaled matrix products take: a table of kernels, and operands laid out for them.

All of them are `torch.nn.functional.scaled_mm` and compute ``a b^T`` for an a of rows and a b of
rows, both multiplied along their last dimension. They differ in what shares a scale, and in how
the scales lie in memory; both are in torch's checks of its arguments (ScaledBlas.cpp).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import Spec, format_of, rotated, rounding_of, static_scale, untiled
from ..casts.counts import observe
from ..formats.quantize import quantize_operand
from ..recipes.scaling import (
    history_scale,
    inverse_of,
    scale_of,
    scaled_tiles,
    unit_of,
    with_margin,
)
from ..tensors.scaled_tensor import plain

__all__ = [
    "ALIGNMENT",
    "KERNELS",
    "Kernel",
    "Stored",
    "kernel_of",
    "multiply",
    "store",
    "swizzled",
    "turned",
    "why_not_device",
    "why_not_kernel",
]

ALIGNMENT = 16
"""The sizes of a weight must be multiples of this: the kernels of CUDA read 16 bytes at a time.
Asked for on every device, so that what runs natively on one does on all."""

Capability = tuple[int, int]


class Kernel(NamedTuple):
    """A row of KERNELS."""

    formats: tuple[tuple[str, str], ...]
    """What it multiplies by what."""
    least: Capability
    """The compute capability of CUDA devices from which on they have it."""
    below: Capability | None
    """The one from which on they do not, None for those of today."""
    cpu: bool
    multiple: int = ALIGNMENT
    """The sizes of a weight must be multiples of this; tokens are filled up to it."""

    @property
    def devices(self) -> str:
        """Those that have it, in words."""
        if self.cpu:
            return "CUDA devices with FP8"
        first = f"CUDA devices of compute capability {'.'.join(map(str, self.least))}"
        return first if self.below else f"{first} and up"


_EIGHT_BITS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))

KERNELS: dict[str, Kernel] = {
    "tensor": Kernel(_EIGHT_BITS, (8, 9), None, cpu=True),
    "row": Kernel(_EIGHT_BITS, (8, 9), None, cpu=True),
    # torch refuses it beyond Hopper.
    "block": Kernel((("e4m3", "e4m3"),), (9, 0), (10, 0), cpu=False, multiple=128),
    # Not e2m1: of its packed numbers torch 2.13 expects half the scales when it compiles.
    "mx": Kernel((("e4m3", "e4m3"),), (10, 0), None, cpu=False, multiple=32),
    # 16 bytes hold 32 numbers.
    "nv": Kernel((("e2m1", "e2m1"),), (10, 0), None, cpu=False, multiple=32),
}
"""What shares a scale -> what is known of its kernel. What a device has, `fp8.native.selftest`
asks."""

_ALONG = {16: "nv", 32: "mx", 128: "block"}
"""Elements of a row that share a scale -> the kernel."""

_BLOCK_ROWS = 16
"""What the rows of an operand with scales by blocks are filled up to: its columns of scales begin
at multiples of 16 bytes, which are 4 scales."""


def kernel_of(a: Spec | None, b: Spec | None) -> tuple[str, str]:
    """The kernel that multiplies operands under these specs, or "", and why there is none."""
    if a is None or b is None:
        return "", "an operand stays in high precision"
    known = {name for row in KERNELS.values() for pair in row.formats for name in pair}
    for spec in (a, b):
        if spec.format not in known:
            return "", f"the kernels have no format {format_of(spec).name!r}"
        if not _kind(spec):
            return (
                "",
                f"no kernel has tiles of {spec.tile[0]} x {spec.tile[1]} by rule {spec.rule!r}",
            )
    kinds = {_kind(a), _kind(b)}
    if len(kinds) > 1 and kinds != {"tensor", "row"}:
        return "", "no kernel multiplies scales by {} by scales by {}".format(*sorted(kinds))
    kind = "row" if "row" in kinds else kinds.pop()
    if (a.format, b.format) not in KERNELS[kind].formats:
        return "", f"no kernel multiplies {a.format} by {b.format} with scales by {kind}"
    if a.tile == b.tile == (128, 128):
        return "", "no kernel multiplies tiles of 128 x 128 by the same"
    return kind, ""


def _kind(spec: Spec) -> str:
    """The row of KERNELS for operands like this, "" for none."""
    rule, (across, along) = spec.rule, spec.tile
    if not along:
        return "row" if across else "tensor"
    kind = _ALONG.get(along, "")
    rules = {"nv": rule == "e4m3", "mx": rule not in ("e4m3", "exact"), "block": rule != "e4m3"}
    return kind if across in (1, along) and rules.get(kind) else ""


def why_not_device(device: torch.device) -> str:
    """Why ``device`` has no FP8 product at all; "" if it has."""
    if device.type == "cpu" and torch.__version__ < "2.12":
        return f"torch {torch.__version__} has no FP8 product for CPUs, 2.12 has"
    if device.type not in ("cpu", "cuda"):
        return f"no FP8 product is known for {device.type}"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        return "compute capability {}.{}, FP8 needs 8.9".format(*found)
    return ""


def why_not_kernel(kind: str, device: torch.device) -> str:
    """Why ``device`` is not expected to have a kernel of KERNELS; "" if it is."""
    row = KERNELS[kind]
    if device.type == "cpu":
        return "" if row.cpu else f"scales by {kind} need {row.devices}"
    found = torch.cuda.get_device_capability(device)
    if row.least <= found and (row.below is None or found < row.below):
        return ""
    return "scales by {} need {}, not {}.{}".format(kind, row.devices, *found)


class Stored(NamedTuple):
    """An operand of a product, its rows (outer, inner) to be multiplied.

    data: in an FP8 dtype; e2m1 as uint8 (outer, inner / 2), the first number of two in the lower
    half. scale: the value of one unit, float32: 0-dim, or (outer, 1) for rows; else as the kernel
    reads it: "block" (inner / 128, outer) or, of square tiles, (outer / 128, inner / 128 filled up
    to a multiple of 4); "mx" and "nv" `swizzled`, e8m0 and e4m3. unit: what "nv" multiplies scales
    by, 0-dim.
    """

    data: Tensor
    scale: Tensor
    unit: Tensor | None = None


def turned(x: Stored) -> Stored:
    """The transpose of an operand with one scale."""
    return Stored(x.data.t(), x.scale)


def store(
    x: Tensor, spec: Spec, axis: int = -1, history: Tensor | None = None, record: bool = False
) -> Stored:
    """The matrix ``x``, or with axis -2 its transpose, under a spec that `kernel_of` knows.

    axis: the one that the product sums over. history, record: as in
    `fp8.casts.casting.round_straight`. Scales by tiles are filled up with zeros to what the kernel
    takes.
    """
    format = format_of(spec)
    rule, tile, margin = spec.rule, spec.tile, spec.margin
    how = rounding_of(spec)
    x = plain(rotated(plain(x), spec.hadamard, axis) if spec.hadamard else x, torch.float32)
    if history is not None:
        scale = history_scale(x, history, format, rule, margin, record)
        x = x / scale
    elif rule is None:
        scale = static_scale(margin, x)
        x = x / scale if margin else x
    else:
        tiles, dims = scaled_tiles(x, tile, axis)
        scale = with_margin(scale_of(tiles, dims, format, rule), margin, rule)
        if tile[1]:
            assert dims is not None
            inverse = inverse_of(scale, rule)
            units = tiles / scale if inverse is None else tiles * inverse
            y = untiled(quantize_operand(units, format, **how), x, tile, axis)
            scale = scale.squeeze(dims)
            unit = None
            if rule == "e4m3":
                unit = with_margin(unit_of(tiles, dims, format), margin, rule)
            return _tiled(*((y, scale) if axis == -1 else (y.mT, scale.mT)), unit, spec)
        x = x / scale
    numbers = quantize_operand(x, format, **how)
    if spec.label and rule is None and history is None:
        observe(spec.label, x, numbers, None, format)
    y = numbers.to(format.dtype)
    return Stored(y, scale) if axis == -1 else Stored(y.mT, scale.mT if scale.dim() else scale)


def _tiled(y: Tensor, scale: Tensor, unit: Tensor | None, spec: Spec) -> Stored:
    """Numbers (outer, inner) of a format and the scales of their tiles, as kernels read them."""
    across, along = spec.tile
    kind = _kind(spec)
    multiple = KERNELS[kind].multiple
    rows = max(across, _BLOCK_ROWS) if kind == "block" else 1
    y = F.pad(y, (0, -y.shape[1] % multiple, 0, -y.shape[0] % rows))
    if kind == "block":
        data = y.to(format_of(spec).dtype)
        if across == 1:
            columns = F.pad(scale.mT, (0, y.shape[0] - scale.shape[0]), value=1.0)
            return Stored(data, columns.contiguous())
        return Stored(data, F.pad(scale, (0, -scale.shape[1] % 4), value=1.0))
    if across > 1:
        scale = scale.repeat_interleave(across, 0)[: y.shape[0]]
    scale = F.pad(scale, (0, y.shape[1] // along - scale.shape[1]), value=1.0)
    if unit is None:
        return Stored(y.to(format_of(spec).dtype), swizzled(scale.to(torch.float8_e8m0fnu)))
    # The e4m3 numbers that the rule found; more than they reach only where all of a tile is 0.
    scale = (scale / unit).clamp(max=448.0).to(torch.float8_e4m3fn)
    return Stored(_in_pairs(y), swizzled(scale), unit)


def _in_pairs(y: Tensor) -> Tensor:
    """Numbers of e2m1 as uint8, two of a row in one: the bits of the first are the lower ones.

    Its magnitudes, 0 to 2 in steps of 0.5, 3, 4 and 6, are the codes 0 to 7. NaN becomes any.
    """
    m = y.abs()
    bits = torch.minimum(torch.minimum(2 * m, m + 2), m / 2 + 4) + 8 * y.signbit()
    return (bits[:, ::2] + 16 * bits[:, 1::2]).to(torch.uint8)


def swizzled(scale: Tensor) -> Tensor:
    """Scales (rows, columns) of one byte each as the kernels read them, in one dimension.

    Filled up with zeros to tiles of 128 x 4, row by row of these; within one, row i and column j
    are at 16 * (i % 32) + 4 * (i // 32) + j (cuBLAS, "1D Block Scaling Factors Layout").
    """
    rows, columns = scale.shape
    x = F.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = x.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale.dtype)


def multiply(kind: str, a: Stored, b: Stored, factor: float, dtype: torch.dtype) -> Tensor:
    """``factor * a b^T`` in ``dtype``, by a kernel of KERNELS. The factor rides in a's scale, and
    is a multiplication after the product where that is e8m0."""
    x, y = _filled(a.data), _filled(b.data)
    types = F.ScalingType
    swizzle: Any = None
    left: Any = a.scale
    right: Any = b.scale
    if kind == "tensor":
        how: Any = (types.TensorWise, types.TensorWise)
        left = left * factor
    elif kind == "row":
        how = (types.RowWise, types.RowWise)
        left = (left * factor).expand(x.shape[0], 1).flatten()[:, None]
        right = right.expand(y.shape[0], 1).flatten()[None]
    elif kind == "block":
        how = (_block_type(x, left), _block_type(y, right))
        left, right = (left * factor).mT, right.mT
    elif kind == "mx":
        how, swizzle = (types.BlockWise1x32,) * 2, F.SwizzleType.SWIZZLE_32_4_4
    else:
        assert a.unit is not None
        how = ([types.BlockWise1x16, types.TensorWise],) * 2
        swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        left, right = [left, a.unit * factor], [right, b.unit]
    if x.dtype == torch.uint8:
        x, y = x.view(torch.float4_e2m1fn_x2), y.view(torch.float4_e2m1fn_x2)
    # Rows of the first and columns of the second in one piece: the only layout of CUDA.
    result = F.scaled_mm(
        x, y.t(), left, how[0], right, how[1], swizzle, swizzle, output_dtype=dtype
    )
    return result * factor if kind == "mx" and factor != 1 else result


def _filled(data: Tensor) -> Tensor:
    """Its rows in one piece, filled up with zeros to a multiple of 16 bytes: they add nothing."""
    if missing := -data.shape[1] % ALIGNMENT:
        bytes = data.view(torch.uint8)  # float8 tensors cannot be padded
        return F.pad(bytes, (0, missing)).view(data.dtype)
    return data.contiguous()


def _block_type(x: Tensor, scale: Tensor) -> Any:
    """Which tiles scales by blocks belong to: a row of them to each 128 columns, or rows."""
    rows = scale.shape == (x.shape[1] // 128, x.shape[0])
    return F.ScalingType.BlockWise1x128 if rows else F.ScalingType.BlockWise128x128
