"""Interpolation: weighted sums of neighbours, with the weights of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.constant import constant
from ..rules.table import Scales, row, tie
from ..scale import scale_output

__all__ = ["interpolate"]

# Larger sizes are approximated by this one, with the same ratio.
_LARGE = 256

# Modes that act on one dimension; 2D modes are measured with the other dimension of size 1.
_FLAT = ("nearest", "nearest-exact", "area", "linear")
_ALONG = {"bilinear": "linear", "trilinear": "linear"}


def _energy(size: int, wanted: int, mode: str, align_corners: bool | None) -> float:
    """The sum of the squared weights of ``wanted`` elements interpolated from ``size``."""
    eye = torch.eye(size, dtype=torch.float64, device="cpu")[:, None]
    if mode in _FLAT:
        weights = F.interpolate(eye, wanted, mode=mode, align_corners=align_corners)
    else:
        shape = (1, wanted)
        weights = F.interpolate(eye[:, None], shape, mode=mode, align_corners=align_corners)
    return float(weights.square().sum())


def interpolate_scales(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """1/RMS of weighted sums with torch's weights; inputs that are copied sum their gradients."""
    dims = max(1, input.ndim - 2)
    sizes = input.shape[-dims:]
    if size is not None:
        wanted = [size] * dims if isinstance(size, int) else list(size)
    else:
        factors = (
            scale_factor if isinstance(scale_factor, Sequence) else [scale_factor or 1.0] * dims
        )
        wanted = [max(1, math.floor(n * f)) for n, f in zip(sizes, factors, strict=True)]
    output = gradient = 1.0
    for n, m in zip(map(index, sizes), map(index, wanted), strict=True):  # may be symbolic
        if n > _LARGE:
            n, m = _LARGE, max(1, round(m * _LARGE / n))
        energy = constant(_energy, n, m, _ALONG.get(mode, mode), align_corners) if n else 1.0
        output *= m / energy
        gradient *= n / energy if n else 1.0
    return tie(constraint, output=math.sqrt(output), input=math.sqrt(gradient))


@row(interpolate_scales, replaces=(F.interpolate,))
def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Computes ``s * interpolate(input)``, with torch's arguments.

    The rule assumes uncorrelated neighbours and ignores ``antialias``.

    Args:
        input: (batch, channels, ...), floating point.
        constraint: see `unit_scaling.constraints`.
    """
    s = interpolate_scales(input, size, scale_factor, mode, align_corners, constraint)
    output = F.interpolate(
        input,
        size,
        scale_factor,
        mode,
        align_corners,
        recompute_scale_factor,
        antialias,
    )
    return scale_output(output, s["output"], s["input"])
