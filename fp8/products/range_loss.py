"""What the range of a format costs an operand: how far the signal-to-quantization-noise ratio
(SQNR) of its cast is below the SQNR of the same significands without limits of the exponent, and
the share of elements that are lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..casts.casting import cast_values
from ..casts.counts import decibels
from ..formats.format import Format, get_format
from ..frame import FRAMES
from ..recipes.cast import Cast
from ..recipes.history import role_of
from ..recipes.recipe import Recipe

__all__ = [
    "TOLERANCE",
    "ProductCasts",
    "RangeLoss",
    "measured_loss",
    "range_loss",
    "sqnr",
    "without_limits",
]

#: The dB that a cast may lose to the range of its format.
TOLERANCE = 1.5

#: The share of its nonzero elements that a cast may lose. The decays of state-space models lose up
#: to 0.85, without an effect: a product hardly depends on those that become zero.
MOST = 0.9


@dataclass(frozen=True)
class RangeLoss:
    """What one cast loses.

    Attributes:
        scale: the scale factor; 1 if each tile has its own.
        decibels: the loss of SQNR, never below 0; Inf for an operand that is not finite.
        share: the share of the nonzero elements with an error above half of their size: they
            become zero, or saturate at less than half.
    """

    scale: float
    decibels: float
    share: float

    @property
    def is_small(self) -> bool:
        """Whether it is within `TOLERANCE` and `MOST`. The largest elements determine the
        SQNR: beside a few of them the others may become zero."""
        return self.decibels <= TOLERANCE and self.share <= MOST

    def __str__(self) -> str:
        return f"{self.decibels:.2g} dB and {self.share:.0%} of its values"


class ProductCasts:
    """The casts of the next product of this thread: of the open block, with the static scales of
    its layer, or, without a block, of another recipe.

    Args:
        otherwise: the other recipe.
        product: "linear", "matmul", ...; operands: its tensors.
    """

    def __init__(self, otherwise: Recipe, product: str, *operands: Tensor) -> None:
        block = FRAMES.items[-1].block
        self._recipe, state = otherwise, None
        if block is not None and block.recipe is not None:
            self._recipe, state = block.recipe, block.state
        self._scales = {} if state is None else state.scales(product, *operands)

    def operand(self, x: Tensor, index: int, is_weight: bool) -> RangeLoss:
        """What an operand loses."""
        cast = self._recipe.weight if is_weight else self._recipe.input
        return self._loss(x, cast, role_of(index))

    def gradient(self, x: Tensor) -> RangeLoss:
        """What the gradient of the output loses."""
        return self._loss(x, self._recipe.grad, "grad")

    def _loss(self, x: Tensor, cast: Cast | None, role: str) -> RangeLoss:
        if cast is None:  # it stays as it is
            finite = bool(x.isfinite().all())
            return RangeLoss(1.0, 0.0 if finite else math.inf, 0.0)
        return range_loss(x, cast, self._scales.get(role))


@torch.no_grad()
def range_loss(x: Tensor, cast: Cast, state: Tensor | None = None) -> RangeLoss:
    """Casts ``x``, to nearest and without a rotation, and measures what it loses.

    Args:
        x: strided, not empty.
        cast: its tiles are along the last axis.
        state: the state of its scaling. A static scale that is 0 or None is not set: then it is the
            scale that `fp8.calibrate` would set for ``x``.
    """
    spec = replace(cast.unrotated, rounding="nearest")
    x = x.detach()
    x = x if x.dim() > 1 else x.reshape(1, -1)
    if cast.scaling == "static":
        # With a dimension it is measured.
        unset = x.new_zeros(1, dtype=torch.float32)
        is_set = state is not None and bool(state > 0)
        state = state.reshape(()) if state is not None and is_set else unset
    y, scale = cast_values(x, spec, -1, state, False)
    return measured_loss(
        x,
        y,
        1.0 if scale is None else float(scale),
        get_format(cast.format),
    )


def measured_loss(x: Tensor, y: Tensor, scale: float, format: Format) -> RangeLoss:
    """What ``x`` has lost in its cast to ``y``, at one scale or at the scales of tiles.

    The SQNR is compared with the SQNR of normal values in range, or, where it is less, of these
    values without limits of the exponent: a few values may lie where the format rounds coarsely.
    """
    x, y = x.double(), y.double()
    if not bool(x.isfinite().all()):
        return RangeLoss(scale, math.inf, 1.0)
    lost = (x - y).abs() > x.abs() / 2
    share = float(lost.sum()) / max(float(x.count_nonzero()), 1.0)
    # 6.02 dB for each bit of the significand: normal values have 31.5 in e4m3, 25.5 in e5m2.
    of_normal = 20 * math.log10(2.0) * format.mantissa_bits + 13.45
    best = min(of_normal, sqnr(x, without_limits(x, format)))
    return RangeLoss(scale, max(best - sqnr(x, y), 0.0), share)


def without_limits(x: Tensor, format: Format) -> Tensor:
    """``x`` rounded to the significands of a format, at any exponent."""
    significand, exponent = torch.frexp(x)
    bits = format.mantissa_bits + 1
    return torch.ldexp((significand * 2**bits).round(), exponent - bits)


def sqnr(x: Tensor, y: Tensor) -> float:
    """The SQNR of ``y``, ``x`` rounded, in dB; Inf if they are equal."""
    noise = (x - y).square().sum()
    return decibels(float(x.square().sum()), float(noise))
