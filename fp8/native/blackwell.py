"""The layout of operands of Blackwell's products with scales by blocks: e4m3 values with e8m0
scales of 32 (MXFP8), and pairs of e2m1 values with e4m3 scales of 16 and one of the tensor (NVFP4).
The scales of a tile of 128 rows and 4 blocks are 512 consecutive bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import LoweredCast, QuantizedOperand, format_of
from ..formats.quantize import in_dtype
from ..recipes.scaling import widened


def block_scaled(
    y: Tensor, scale: Tensor, unit: Tensor | None, spec: LoweredCast
) -> QuantizedOperand:
    """The operand of quotients ``y``, padded to the multiple of the kernel, with scales by tiles;
    NVFP4 if their factor ``unit`` is not None."""
    across, along = spec.tile
    scale = widened(scale, (y.shape[0], scale.shape[1]), (across, 1))
    scale = F.pad(scale, (0, y.shape[1] // along - scale.shape[1]), value=1.0)
    if unit is None:
        scale = swizzled(scale.to(torch.float8_e8m0fnu))
        return QuantizedOperand(in_dtype(y, format_of(spec).dtype), scale)
    # Restores the e4m3 values of the rule; a value above their range occurs only for all-zero
    # tiles.
    scale = (scale / unit).clamp(max=448.0).to(torch.float8_e4m3fn)
    return QuantizedOperand(in_pairs(y), swizzled(scale), unit)


def in_pairs(y: Tensor) -> Tensor:
    """Packs e2m1 values, which may be off by errors of float32, as uint8, two of a row in one; the
    first is in the lower four bits. The magnitudes 0 to 2 in steps of 0.5, 3, 4 and 6 have the
    codes 0 to 7. NaN becomes an arbitrary code."""
    m = y.abs()
    bits = torch.minimum(torch.minimum(2 * m, m + 2), m / 2 + 4).round() + 8 * y.signbit()
    return (bits[:, ::2] + 16 * bits[:, 1::2]).to(torch.uint8)


def swizzled(scale: Tensor) -> Tensor:
    """One-byte scales (rows, columns) in the layout of the kernels, flattened to one dimension:
    padded with zeros to tiles of 128 x 4, stored row by row. Within a tile, row i and column j are
    at 16 * (i % 32) + 4 * (i // 32) + j (cuBLAS, "1D Block Scaling Factors Layout")."""
    rows, columns = scale.shape
    x = F.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = x.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale.dtype)
