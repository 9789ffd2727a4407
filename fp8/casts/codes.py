"""An operand as a kernel reads it: numbers of the format, and the scales apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.quantize import quantize_operand
from ..recipes.rules import scale_format
from ..tensors.scaled_tensor import plain
from . import casting
from .casting import Spec, format_of, rounding_of
from .counts import Observed, observe


class Codes(NamedTuple):
    """values: numbers of the format, float32, (..., outer, inner), the sum runs over inner. scale:
    float32: 0-dim; (outer, 1) for rows; (..., outer / across, inner / along) for tiles. unit: the
    tensor-level factor of scales in e4m3, 0-dim; None for others."""

    values: Tensor
    scale: Tensor
    unit: Tensor | None = None

    @property
    def mT(self) -> Codes:
        """The transpose of an operand with one scale, or one for each square tile."""
        scale = self.scale.mT if self.scale.ndim else self.scale
        return Codes(self.values.mT, scale, self.unit)


def codes(
    x: Tensor,
    spec: Spec,
    axis: int = -1,
    history: Tensor | None = None,
    record: bool = False,
    turn: Tensor | None = None,
) -> Codes:
    """Casts ``x``, or with axis -2 its transpose, under a spec.

    axis: the axis that the product sums over. history, record, turn: as in
    `fp8.casts.casting.rounded`.
    """
    x = casting.rotated(plain(x), spec.hadamard, axis, turn) if spec.hadamard else x
    x = plain(x, torch.float32)
    scale = casting.whole_scale(x, spec, history, record)
    if spec.rule is None or scale is not None:
        found = _of_whole(x, spec, scale, observed=history is None)
    else:
        values, scale, tiles, dims = casting.by_tiles(x, spec, axis)
        has_unit = scale_format(spec.rule) == "e4m3"
        unit = casting.tensor_unit(tiles, dims, spec) if has_unit else None
        scale = scale.squeeze(dims) if spec.tile[1] else scale
        found = Codes(casting.untiled(values, x, spec.tile, axis), scale, unit)
    return found.mT if axis == -2 else found


def _of_whole(x: Tensor, spec: Spec, scale: Tensor | None, observed: bool) -> Codes:
    """By one scale; None is the scale 1. Only casts without a rule are observed."""
    format = format_of(spec)
    units = x if scale is None else x / scale
    values = quantize_operand(units, format, **rounding_of(spec))
    if spec.label and spec.rule is None and observed:
        observe(spec.label, Observed(units, values, None, format))
    return Codes(values, casting.static_scale(0, x) if scale is None else scale)


def widened(scale: Tensor, shape: Sequence[int], tile: tuple[int, int]) -> Tensor:
    """``scale``, one for each tile of the last two dimensions (0: all), repeated for each element
    of ``shape``; 0-dim stays so."""
    for dim, by in zip((-2, -1), tile, strict=True):
        if scale.ndim and by != 1:
            scale = scale.repeat_interleave(by or shape[dim], dim).narrow(dim, 0, shape[dim])
    return scale


def narrowed(scale: Tensor, tile: tuple[int, int]) -> Tensor:
    """One scale for each tile, of the scale of each element of a matrix that is not empty."""
    rows, columns = (by or size for by, size in zip(tile, scale.shape, strict=True))
    return scale[::rows, ::columns]
