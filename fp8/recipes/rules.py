"""The rules of scales: the scale factor of a tile, from its largest magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..formats.format import Format, get_format
from ..formats.quantize import quantize
from ..formats.rounding import LAYOUTS, divided

SMALLEST, LARGEST = -126, 126
"""The exponents of scale factors: normal numbers of float32, as their inverses are. Those of E8M0
are from -127 to 127."""

E8M0 = " e8m0"
"""Suffix of a rule whose scales are stored in E8M0: see `scale_of`."""


def defined(scale: Tensor, amax: Tensor) -> Tensor:
    """``scale`` clamped to its range; 1 where ``amax``, which is finite, is zero."""
    return torch.where(amax > 0, scale.clamp(2.0**SMALLEST, 2.0**LARGEST), 1.0)


def _power(amax: Tensor, format: Format, carry: int) -> Tensor:
    """2**(e - E), for ``amax`` = m * 2**e and the format's largest value M * 2**E, in the range of
    E8M0. carry: added to the bits of ``amax``; e is one larger if it carries into the exponent."""
    layout = LAYOUTS[amax.dtype]
    one, (low, high) = 1 << layout.mantissa_bits, _LIMITS[amax.dtype]
    top = math.frexp(format.max)[1] - 1
    power = (amax.view(layout.integer) + (carry - top * one)) & -one
    return power.clamp(low, high).view(amax.dtype)


_LIMITS = {
    dtype: (layout.encode(2.0 ** (SMALLEST - 1)), layout.encode(2.0 ** (LARGEST + 1)))
    for dtype, layout in LAYOUTS.items()
}
"""The bits of the smallest and largest result of `_power`."""


def _up(amax: Tensor, format: Format) -> Tensor:
    """The smallest power of two that avoids overflow ("round up" of Mishra et al.,
    arXiv:2506.08027; torchao's RCEIL)."""
    one = 1 << LAYOUTS[amax.dtype].mantissa_bits
    significand = math.frexp(format.max)[0]  # from 0.5
    return _power(amax, format, 2 * one - 1 - int(2 * significand * one))


def _floor(amax: Tensor, format: Format) -> Tensor:
    """2**(e - E), with e and E the exponents of amax and of the format's largest value. Values
    between that value and the next power of two saturate (OCP MX specification 1.0, section 6.3).
    """
    return _power(amax, format, 0)


def _exact(amax: Tensor, format: Format) -> Tensor:
    """amax divided by the format's largest value, in float32; not a power of two."""
    return divided(amax, format.max)


_LEAST, _NORMAL = 2.0**-9, 2.0**-6  # the smallest e4m3 values, subnormal and not


def _e4m3(amax: Tensor, format: Format, unit: Tensor, guard: float | None = None) -> Tensor:
    """``exact``, rounded to the nearest e4m3 value in units of the tensor's amax / (448 * the
    format's largest value) (NVFP4, arXiv:2509.25149, section 2). Where it is rounded down, the
    largest values of the block saturate: stochastic rounding is biased toward zero. The e4m3 value
    is at least its smallest subnormal, 2**-9: TransformerEngine keeps subnormals, torchao stops at
    2**-6."""
    exact = divided(divided(amax, format.max), unit)
    exact = exact if guard is None else guard * exact
    return quantize(exact, get_format("e4m3")).clamp(min=_LEAST) * unit


def _e4m3_up(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """As ``e4m3``, rounded up to an e4m3 value. No value saturates, so stochastic rounding is
    unbiased. The squared error of normal data under it is 1.18 times that under ``e4m3``."""
    exact, layout = divided(divided(amax, format.max), unit), LAYOUTS[amax.dtype]
    # An e4m3 value is not rounded up for the errors of these divisions.
    exact = exact * (1 - 4 * torch.finfo(exact.dtype).eps)
    power = (exact.view(layout.integer) & layout.infinity).view(exact.dtype)
    step = power.clamp(min=_NORMAL) * 2.0**-3
    return ((exact / step).ceil() * step).clamp(_LEAST, 448.0) * unit


GUARD = 17 / 16
"""The largest relative error of a number that is rounded down to an e4m3 value, as a factor."""


def _e4m3_guarded(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """``e4m3`` for 17/16 of amax, with 256 in place of 448 in the unit: no value of a block
    saturates whose scale is not subnormal in e4m3 (the published code of Quartet II,
    arXiv:2601.22813). The squared error of normal data under stochastic rounding is 1.25 times that
    under ``e4m3``."""
    return _e4m3(amax, format, unit, GUARD)


def _four_over_six(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """``e4m3``, or that for 1.5 * amax, which maps the largest magnitude to 4 instead of 6 in e2m1:
    for each tile the one with the smaller squared error, the first of equal ones. The unit has 256
    in place of 448, so that 1.5 times the largest scale is an e4m3 value (four over six,
    arXiv:2512.02010, section 3). Errors are those of rounding to nearest, whatever the cast's
    rounding is."""
    return _e4m3(amax, format, unit)


def _four_over_six_up(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """As ``e4m3_4_6``, both scales rounded up to e4m3 values, so that no value saturates."""
    return _e4m3_up(amax, format, unit)


EDEN = GUARD * 0.93
"""The factor of the largest magnitude under rule "e4m3_eden": the largest value of e2m1 stands for
6.07 sixths of it, which lowers the error of normal data (the published code of Quartet II)."""


def _eden(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """MS-EDEN (Quartet II, arXiv:2601.22813): ``e4m3`` for 0.988 * amax, with 256 in place of 448
    in the unit. Values are rounded to nearest by this scale and multiplied by another one, which
    makes them unbiased: it is larger by <x, x> / <x, Q(x)> of the blocks that are rotated together,
    and rounded stochastically to e4m3. Needs a rotation with random signs."""
    return _e4m3(EDEN * amax, format, unit)


RULES: dict[str, Callable[..., Tensor]] = {
    "up": _up,
    "floor": _floor,
    "exact": _exact,
    "e4m3": _e4m3,
    "e4m3_up": _e4m3_up,
    "e4m3_guarded": _e4m3_guarded,
    "e4m3_4_6": _four_over_six,
    "e4m3_4_6_up": _four_over_six_up,
    "e4m3_eden": _eden,
}
"""Name -> function of (largest magnitude of a tile, format) that returns the tile's scale, or the
first candidate of a rule in BY_ERROR. Those of rules in UNITS take the unit as well."""

POWERS = ("up", "floor")
"""Rules whose scales are powers of two, by which every division is exact."""

BY_ERROR = ("e4m3_4_6", "e4m3_4_6_up")
"""Rules that choose the scale of amax or that of 1.5 * amax by its squared error."""


def _unit(amax: Tensor, largest: float) -> Tensor:
    """The unit in which ``largest`` stands for the largest of these amax, all finite."""
    whole = amax.amax()
    return defined(divided(whole, largest), whole)


UNITS: dict[str, Callable[[Tensor, Format], Tensor]] = {
    **dict.fromkeys(("e4m3", "e4m3_up"), lambda amax, format: _unit(amax, 448.0 * format.max)),
    **dict.fromkeys(BY_ERROR, lambda amax, format: _unit(amax, 256.0 * format.max)),
    "e4m3_guarded": lambda amax, format: _unit(amax, 256.0 / GUARD * format.max),
    "e4m3_eden": lambda amax, format: _unit(EDEN * amax, 256.0 * format.max),
}
"""Rule whose scales are e4m3 values times a unit of the tensor -> function of (largest magnitudes
of all tiles, format) that returns the unit."""

CORRECTED = ("e4m3_eden",)
"""Rules in UNITS whose scale, after the values are rounded by it, is replaced by `corrected`."""
