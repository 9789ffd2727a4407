"""Scales of operands that processes divide, as tensor parallelism does: those of the whole operand.

Each process rounds its part. The largest magnitude of what shares a scale is reduced over the
processes that divide it, so that every element is rounded as in one process.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.dtensor import check_whole, part_of, reduced
from ..formats.format import Format
from ..recipes.rules import UNITS
from ..recipes.scaling import Tile, largest_finite, scale_of, unit_of


def amax_of(x: Any) -> Tensor:
    """The largest finite magnitude of a whole DTensor, 0-dim, on every process; 0 without one."""
    local = part_of(x)
    amax = largest_finite(local, None) if local.numel() else local.new_zeros(())
    return reduced(x, amax, range(x.ndim), "max")


def scales_of(
    x: Any,
    tiles: Tensor,
    dims: tuple[int, ...] | None,
    format: Format,
    rule: str,
    tile: Tile,
    axis: int,
) -> Tensor:
    """`scale_of` for ``tiles``, those of the local part of ``x``, as in the whole of ``x``.

    Raises ValueError if processes divide a tile of more than one and less than all elements.
    """
    for dim, by in zip((-2, -1), tile if axis == -1 else tile[::-1], strict=True):
        if by > 1:
            check_whole(x, dim, by)
    if rule in UNITS:
        return scale_of(tiles, dims, format, rule, unit_of(amax_of(x), None, format, rule))
    if 0 in tile:
        amax = reduced(x, largest_finite(tiles, dims), [axis], "max")
        return scale_of(amax, dims, format, rule)
    return scale_of(tiles, dims, format, rule)
