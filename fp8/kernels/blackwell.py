"""The layout of scales of Blackwell's kernels for MXFP8 and NVFP4: the scales of a tile of 128 rows
and 4 blocks are 512 consecutive bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..recipes.cast import Cast
from ..recipes.scaling import widened
from .kernel import padded


def of_blocks(scale: Tensor, values: Tensor, cast: Cast) -> Tensor:
    """The scale of each block of a row of padded ``values``, from those of tiles; 1 for padding."""
    across, along = cast.tile
    blocks = values.shape[1] // along
    size = (values.shape[0], scale.shape[1])
    scale = widened(scale, size, (across, 1))
    missing = blocks - scale.shape[1]
    return F.pad(scale, (0, missing), value=1.0)


def swizzled(scale: Tensor) -> Tensor:
    """One-byte scales (rows, columns) in the layout of the kernels, flattened to one dimension:
    padded with zeros to tiles of 128 x 4, stored row by row. Within a tile, row i and column j are
    at 16 * (i % 32) + 4 * (i // 32) + j (cuBLAS, "1D Block Scaling Factors Layout")."""
    rows, columns = scale.shape
    bytes = padded(scale.view(torch.uint8), 4, 128)
    tiles = bytes.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    flat = tiles.permute(0, 3, 2, 1, 4).flatten()
    return flat.view(scale.dtype)
