"""torch's scaled matrix products: a table of the kernels, and operands in the layout they need.

All kernels are called through `torch.nn.functional.scaled_mm` and compute ``a b^T``; a and b are
both multiplied along their last dimension. They differ in which elements share a scale and in the
memory layout of the scales. Both follow from torch's argument checks (ScaledBlas.cpp).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import LoweredCast, QuantizedOperand, format_of, quantized, static_scale
from ..common.compiler import in_graph, in_memory
from ..formats.quantize import in_dtype
from ..recipes.rules import CORRECTED, UNITS
from .blackwell import block_scaled

ALIGNMENT = 16
"""The sizes of a weight must be multiples of this, because CUDA kernels read 16 bytes at a time.
The rule holds on every device, so that what runs natively on one runs natively on all."""

Capability = tuple[int, int]


class GemmKernel(NamedTuple):
    """A row of KERNELS. formats: the pairs of those of operands. least, below: the lowest CUDA
    compute capability that has the kernel, and that no longer has it, if any. multiple: the sizes
    of a weight must be multiples of this; tokens are padded to it."""

    formats: tuple[tuple[str, str], ...]
    least: Capability
    below: Capability | None
    cpu: bool
    multiple: int = ALIGNMENT

    @property
    def devices(self) -> str:
        """A description of the devices that have the kernel."""
        if self.cpu:
            return "CUDA devices with FP8"
        first = f"CUDA devices of compute capability {'.'.join(map(str, self.least))}"
        return first if self.below else f"{first} and up"


_EIGHT_BITS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))

KERNELS: dict[str, GemmKernel] = {
    "tensor": GemmKernel(_EIGHT_BITS, (8, 9), None, cpu=True),
    "row": GemmKernel(_EIGHT_BITS, (8, 9), None, cpu=True),
    # torch rejects it on capabilities above Hopper.
    "block": GemmKernel((("e4m3", "e4m3"),), (9, 0), (10, 0), cpu=False, multiple=128),
    # Not e2m1: when compiling, torch 2.13 expects half the number of scales for packed values.
    "mx": GemmKernel((("e4m3", "e4m3"),), (10, 0), None, cpu=False, multiple=32),
    # 16 bytes hold 32 values.
    "nv": GemmKernel((("e2m1", "e2m1"),), (10, 0), None, cpu=False, multiple=32),
}
"""Which elements share a scale -> its kernel. `fp8.native.selftest` tests those of a device."""

HIGH = "high"
"""The kind of a product whose operands both stay in high precision: torch's own."""

_ALONG = {16: "nv", 32: "mx", 128: "block"}
"""Elements of a row that share a scale -> the kernel."""


def kernel_of(a: LoweredCast | None, b: LoweredCast | None) -> tuple[str, str]:
    """The kernel (or HIGH) for operands under these casts, and ""; or "" and why there is none."""
    if a is None and b is None:
        return HIGH, ""
    if a is None or b is None:
        return "", "one operand of a product stays in high precision"
    kinds = {_kind(a), _kind(b)}
    if "random" in (a.signs, b.signs):
        return "", "random signs of a rotation are simulated"
    if "" in kinds:
        spec = b if _kind(a) else a
        return "", "no kernel has tiles of {} x {} by rule {!r}".format(*spec.tile, spec.rule)
    if len(kinds) > 1 and kinds != {"tensor", "row"}:
        return "", "no kernel multiplies scales by {} by scales by {}".format(*sorted(kinds))
    kind = "row" if "row" in kinds else kinds.pop()
    if (a.format, b.format) not in KERNELS[kind].formats:
        formats = f"{format_of(a)} by {format_of(b)}"
        return "", f"no kernel multiplies {formats} with scales by {kind}"
    if a.tile == b.tile == (128, 128):
        return "", "no kernel multiplies tiles of 128 x 128 by the same"
    return kind, ""


def _kind(spec: LoweredCast) -> str:
    """The row of KERNELS for operands under this cast; "" for none."""
    rule, (across, along) = spec.rule, spec.tile
    if not along:
        return "row" if across else "tensor"
    kind = _ALONG.get(along, "")
    rules = {
        "nv": rule in UNITS and rule not in CORRECTED,
        "mx": rule not in (*UNITS, "exact"),
        "block": rule not in UNITS,
    }
    return kind if across in (1, along) and rules.get(kind) else ""


def why_not_device(device: torch.device) -> str:
    """Why ``device`` has no FP8 product at all; "" if it has one."""
    if device.type == "cpu" and torch.__version__ < "2.12":
        return f"torch {torch.__version__} has no FP8 product for CPUs, 2.12 has"
    if device.type not in ("cpu", "cuda"):
        return f"no FP8 product is known for {device.type}"
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < (8, 9):
        return "compute capability {}.{}, FP8 needs 8.9".format(*has)
    return ""


def why_not_kernel(kind: str, device: torch.device) -> str:
    """Why ``device`` is not expected to have a kernel of KERNELS, or HIGH; "" if it is."""
    if kind == HIGH:
        return ""
    row = KERNELS[kind]
    if device.type == "cpu":
        return "" if row.cpu else f"scales by {kind} need {row.devices}"
    capability = torch.cuda.get_device_capability(device)
    if row.least <= capability and (row.below is None or capability < row.below):
        return ""
    return "scales by {} need {}, not {}.{}".format(kind, row.devices, *capability)


def store(
    x: Tensor,
    spec: LoweredCast | None,
    axis: int = -1,
    history: Tensor | None = None,
    record: bool = False,
) -> QuantizedOperand:
    """`quantized` of the matrix ``x`` in the layout of a kernel, under a cast that `kernel_of`
    supports; ``x``, or with axis -2 its transpose, without a cast.

    values: in an FP8 dtype; for "nv" in pairs. scale: float32, 0-dim, or (outer, 1) for rows;
    "block": (inner / 128, outer), or for square tiles (outer / 128, inner / 128 padded to a
    multiple of 4); "mx" and "nv" as `fp8.native.blackwell`. Operands with scales by tiles are
    padded with zeros to the sizes that the kernel needs.
    """
    if spec is None:
        return QuantizedOperand((x if axis == -1 else x.mT).detach(), static_scale(0, x))
    y, scale, unit = quantized(x, spec, axis, history, record, converts=True)
    across, along = spec.tile
    dtype, kind = format_of(spec).dtype, _kind(spec)
    if not along:  # under a plain cast Inf is NaN already, in graphs, which have no labels
        return QuantizedOperand(y.to(dtype) if spec.is_plain else in_dtype(y, dtype), scale)
    # A column of scales starts at a multiple of 16 bytes.
    rows = max(across, ALIGNMENT) if kind == "block" else 1
    y = F.pad(y, (0, -y.shape[1] % KERNELS[kind].multiple, 0, -y.shape[0] % rows))
    if kind == "block":
        if across == 1:
            scale = F.pad(scale.mT, (0, y.shape[0] - scale.shape[0]), value=1.0).contiguous()
        else:
            scale = F.pad(scale, (0, -scale.shape[1] % 4), value=1.0)
        return QuantizedOperand(in_dtype(y, dtype), scale)
    return block_scaled(y, scale, unit, spec)


@in_graph  # torch 2.11 and 2.12 cannot trace scaled_mm
def multiply(
    kind: str,
    a: QuantizedOperand,
    b: QuantizedOperand,
    factor: float,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """``factor * a b^T`` in ``dtype``, by a kernel of KERNELS or, for HIGH, by torch. The factor is
    folded into a's scale; with e8m0 scales and for HIGH it multiplies the result. fast: as
    `Recipe.fast_sums`."""
    if kind == HIGH:
        return times(torch.mm(a.values.to(dtype), b.values.to(dtype).mT), factor)
    x, y = in_memory(_filled(a.values)), in_memory(_filled(b.values))
    types = F.ScalingType
    swizzle: Any = None
    left: Any = a.scale if kind in ("mx", "nv") else times(a.scale, factor)
    right: Any = b.scale
    if kind == "tensor":
        how: Any = (types.TensorWise, types.TensorWise)
    elif kind == "row":
        how = (types.RowWise, types.RowWise)
        left = left.expand(x.shape[0], 1).flatten().contiguous()[:, None]
        right = right.expand(y.shape[0], 1).flatten().contiguous()[None]
    elif kind == "block":
        how = (_block_type(x, left), _block_type(y, right))
        left, right, fast = left.mT, right.mT, False  # torch refuses fast sums of blocks
    elif kind == "mx":
        how, swizzle = (types.BlockWise1x32,) * 2, F.SwizzleType.SWIZZLE_32_4_4
    else:
        assert a.unit is not None
        how = ([types.BlockWise1x16, types.TensorWise],) * 2
        swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        left, right = [left, times(a.unit, factor)], [right, b.unit]
    if x.dtype == torch.uint8:
        x, y = x.view(torch.float4_e2m1fn_x2), y.view(torch.float4_e2m1fn_x2)
    # Row-major first and column-major second operand: the only layout that CUDA supports.
    result = F.scaled_mm(
        *(x, y.t(), left, how[0], right, how[1], swizzle, swizzle),
        output_dtype=dtype,
        use_fast_accum=fast,
    )
    return times(result, factor) if kind == "mx" else result


def times(x: Tensor, factor: float) -> Tensor:
    """``factor * x``; ``x`` itself for 1."""
    return x if factor == 1 else x * factor


def _filled(data: Tensor) -> Tensor:
    """The data with contiguous rows, padded with zeros to a multiple of 16 bytes."""
    if missing := -data.shape[1] % ALIGNMENT:
        bytes = data.view(torch.uint8)  # float8 tensors cannot be padded
        return F.pad(bytes, (0, missing)).view(data.dtype)
    return data.contiguous()


def _block_type(x: Tensor, scale: Tensor) -> Any:
    """The scaling type of an operand with scales by blocks: 1 x 128 or 128 x 128 tiles."""
    rows = scale.shape == (x.shape[1] // 128, x.shape[0])
    return F.ScalingType.BlockWise1x128 if rows else F.ScalingType.BlockWise128x128
