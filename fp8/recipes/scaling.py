"""Scale factors of operands: which elements share one (the tile), and the rule that computes it.

The stored operand is ``x / scale``; the scale factor is the value of one unit of the format. With
powers of two this division is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.compiler import reads_values
from ..common.dtensor import is_dtensor, part_of, reduced
from ..formats.format import Format, get_format
from ..formats.quantize import quantize, quantize_operand
from ..formats.rounding import LAYOUTS

__all__ = [
    "BY_ERROR",
    "BY_SPREAD",
    "CLIP",
    "CORRECTED",
    "E8M0",
    "LARGEST",
    "RULES",
    "SCALINGS",
    "SMALLEST",
    "UNITS",
    "Scaling",
    "Tile",
    "corrected",
    "delayed_scale",
    "history_scale",
    "in_format",
    "inverse_of",
    "largest_finite",
    "nearest_power",
    "scale_format",
    "scale_of",
    "scaled_tiles",
    "second_moment",
    "unit_of",
    "with_margin",
]

aten = torch.ops.aten

Tile = tuple[int, int]
"""The elements that share a scale: (across, along) the axis that a product sums over; 0 is all."""

SMALLEST, LARGEST = -126, 127
"""The range of scale factors as exponents of two: the normal powers of float32. E8M0 starts at
2**-127. Static scales end at 2**126, so that their inverse is normal too."""

E8M0 = " e8m0"
"""Suffix of a rule name in a spec whose scales are stored in E8M0: see `scale_of`."""


def _power(amax: Tensor, format: Format, carry: int) -> Tensor:
    """2**(e - E), for ``amax`` = m * 2**e and the format's largest value M * 2**E (m, M in [1, 2)).

    carry: added to the bits of ``amax``; e is one larger if the addition carries into the exponent.
    A subnormal amax counts as exponent field zero, below every scale.
    """
    layout = LAYOUTS[amax.dtype]
    exponent = ((amax.view(layout.integer) + carry) >> layout.mantissa_bits) - format.max_exponent
    exponent = exponent.clamp(layout.bias - 126, layout.bias + 127)
    return (exponent << layout.mantissa_bits).view(amax.dtype)


def _one(amax: Tensor) -> int:
    """The step of the exponent field in the bits of ``amax``."""
    return 1 << LAYOUTS[amax.dtype].mantissa_bits


def _up(amax: Tensor, format: Format) -> Tensor:
    """The smallest power of two that avoids overflow ("round up" of Mishra et al.,
    arXiv:2506.08027; torchao's RCEIL)."""
    layout = LAYOUTS[amax.dtype]
    top = layout.encode(format.max) & (_one(amax) - 1)
    return _power(amax, format, _one(amax) - 1 - top)


def _floor(amax: Tensor, format: Format) -> Tensor:
    """2**(e - E), with e and E the exponents of amax and of the format's largest value. Values
    between that value and the next power of two saturate (OCP MX specification 1.0, section 6.3).
    """
    return _power(amax, format, 0)


def _ceil(amax: Tensor, format: Format) -> Tensor:
    """As floor, with amax rounded up to a power of two (torchao's CEIL)."""
    return _power(amax, format, _one(amax) - 1)


def _even(amax: Tensor, format: Format) -> Tensor:
    """As floor, with amax rounded to the format's mantissa bits (torchao's EVEN)."""
    return _power(amax, format, _one(amax) >> (format.mantissa_bits + 1))


def _exact(amax: Tensor, format: Format) -> Tensor:
    """amax divided by the format's largest value, in float32; not a power of two."""
    return amax / format.max


def _fit(amax: Tensor, format: Format) -> Tensor:
    """``floor``, times the factor that keeps all values of all tiles within the format (4 / 3 for
    e2m1; "Training LLMs with MXFP4", arXiv:2502.20586): none saturates, so stochastic rounding is
    unbiased. The factor, one for all tiles, is that of a product there."""
    return _floor(amax, format) * (2.0 ** (format.max_exponent + 1) / format.max)


CLIP = 2.92247856
"""The multiple of the standard deviation of normal data that is e2m1's largest value where the mean
squared error is smallest (the published code of Quartet)."""


def _quest(spread: Tensor, format: Format) -> Tensor:
    """The power of two, rounded down, for which the largest value stands for 2.92 times the
    standard deviation of the tile, in place of its largest magnitude: larger values saturate
    (QuEST's quantizer in Quartet, arXiv:2505.14669, and its published code; optimal for normal data
    in e2m1). Zeros that fill a tile up count. Of equal values the deviation is their magnitude."""
    return _floor(spread * (CLIP / format.max * 2.0**format.max_exponent), format)


def _two_level(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """``exact`` for the tensor, times the power of two, rounded up, that takes it to ``exact`` for
    the tile (MOSS, arXiv:2511.05811): no value saturates."""
    return _ceil(amax / format.max / unit, format) * 2.0**format.max_exponent * unit


def _exact_unit(amax: Tensor, format: Format) -> Tensor:
    """`_exact` of the tensor, for tiles with these amax, all finite."""
    return _defined(_exact(amax.amax(), format), amax.amax())


def _e4m3(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """``exact``, rounded to e4m3 in units of the tensor's amax / (448 * the format's largest value)
    (NVFP4, arXiv:2509.25149, section 2). The e4m3 value is at least its smallest subnormal, 2**-9:
    TransformerEngine keeps subnormals, torchao stops at 2**-6."""
    scale_format = get_format("e4m3")
    scale = quantize(amax / format.max / unit, scale_format)
    return scale.clamp(min=scale_format.min_subnormal) * unit


def _by_error(amax: Tensor, format: Format) -> Tensor:
    """``floor``, or twice that: for each tile the one with the smaller squared error, the first of
    equal ones. Since "up", "ceil" and "even" choose one of these two as well, no tile has a larger
    error than under them. Errors are those of rounding to nearest, whatever the cast's rounding is.
    """
    return _floor(amax, format)


def _four_over_six(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """``e4m3``, or that for 1.5 * amax, which maps the largest magnitude to 4 instead of 6 in e2m1:
    for each tile the one with the smaller squared error, the first of equal ones. The unit has 256
    in place of 448, so that 1.5 times the largest scale is an e4m3 value (four over six,
    arXiv:2512.02010, section 3). Errors are those of rounding to nearest, whatever the cast's
    rounding is."""
    return _e4m3(amax, format, unit)


EDEN = 17 / 16 * 0.93
"""The factor of the largest magnitude under rule "e4m3_eden": the largest value of e2m1 stands for
6.07 sixths of it, which lowers the error of normal data (the published code of Quartet II)."""


def _eden(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    """MS-EDEN (Quartet II, arXiv:2601.22813): ``e4m3`` for 0.988 * amax, with 256 in place of 448
    in the unit. Values are rounded to nearest by this scale and multiplied by another one, which
    makes them unbiased: it is larger by <x, x> / <x, Q(x)> of the blocks that are rotated together,
    and rounded stochastically to e4m3. Needs a rotation with random signs."""
    return _e4m3(EDEN * amax, format, unit)


def _eden_unit(amax: Tensor, format: Format) -> Tensor:
    """`_unit_256` of the magnitudes that `_eden` takes for the largest ones."""
    return _unit_256(EDEN * amax, format)


def _unit_448(amax: Tensor, format: Format) -> Tensor:
    """The tensor-level unit of e4m3 scales up to 448, for tiles with these amax, all finite."""
    whole = amax.amax()
    return _defined(whole / (448.0 * format.max), whole)


def _unit_256(amax: Tensor, format: Format) -> Tensor:
    """As `_unit_448`, for scales up to 256, and up to 384 for 1.5 * amax."""
    whole = amax.amax()
    return _defined(whole / (256.0 * format.max), whole)


def _half_more(amax: Tensor) -> Tensor:
    return 1.5 * amax


def _doubled(amax: Tensor) -> Tensor:
    return 2 * amax


def unit_of(x: Tensor, dims: tuple[int, ...] | None, format: Format, rule: str) -> Tensor:
    """The tensor-level unit of the scales that `scale_of` returns for a rule in UNITS: 0-dim,
    float32 (float64 for float64). x must not be empty."""
    amax = _largest(x.detach(), dims).to(torch.promote_types(x.dtype, torch.float32))
    return UNITS[rule](torch.where(amax < torch.inf, amax, 0.0), format)


RULES: dict[str, Callable[..., Tensor]] = {
    "up": _up,
    "floor": _floor,
    "ceil": _ceil,
    "even": _even,
    "exact": _exact,
    "error": _by_error,
    "fit": _fit,
    "quest": _quest,
    "two_level": _two_level,
    "e4m3": _e4m3,
    "e4m3_4_6": _four_over_six,
    "e4m3_eden": _eden,
}
"""Name -> function of (largest magnitude of a tile, format) that returns the tile's scale, or the
first candidate of a rule in BY_ERROR. Those of rules in UNITS take the unit as well; those in
BY_SPREAD the tile's standard deviation in place of its largest magnitude."""

BY_SPREAD = ("quest",)
"""Rules of the standard deviation."""

BY_ERROR: dict[str, Callable[[Tensor], Tensor]] = {
    "e4m3_4_6": _half_more,
    "error": _doubled,
}
"""Rule that chooses one of two scales by its squared error -> the largest magnitude that the second
one is computed from, given that of the tile. (A function, because a compiler takes numbers in a
table for variables.)"""

UNITS: dict[str, Callable[[Tensor, Format], Tensor]] = {
    "two_level": _exact_unit,
    "e4m3": _unit_448,
    "e4m3_4_6": _unit_256,
    "e4m3_eden": _eden_unit,
}
"""Rule whose scales are eight-bit values times a unit of the tensor -> function of (largest
magnitudes of all tiles, format) that returns the unit. The values are e4m3, or powers of two."""

CORRECTED = ("e4m3_eden",)
"""Rules in UNITS whose scale, after the values are rounded by it, is replaced by `corrected`."""


def scale_format(rule: str | None) -> str:
    """The eight-bit format in which the scales of a rule are stored; "" for float32 or none."""
    if rule is None:
        return ""
    return "e8m0" if rule.endswith(E8M0) else "e4m3" if rule.startswith("e4m3") else ""


class Scaling(NamedTuple):
    """A row of SCALINGS."""

    about: str
    tile: Tile
    """The default tile."""
    rules: tuple[str, ...]
    """Supported names in RULES, the default first; if empty, the scale is not computed by a
    rule."""
    free: bool = False
    """Whether a cast may choose another tile."""


_POWERS = ("up", "floor", "ceil", "even")

SCALINGS: dict[str, Scaling] = {
    "unit": Scaling("1: the operand is expected to have RMS about 1", (0, 0), ()),
    "tensor": Scaling("one of its largest magnitude, now", (0, 0), (*_POWERS, "exact")),
    "delayed": Scaling(
        "one of its largest magnitude in the last passes, which an `AmaxHistory` keeps",
        (0, 0),
        (*_POWERS, "exact"),
    ),
    "static": Scaling(
        "one power of two that brings it to RMS 1, measured once: `fp8.calibrate`", (0, 0), ()
    ),
    "row": Scaling(
        "one for each row along the axis that is summed over: token, output channel",
        (1, 0),
        (*_POWERS, "exact"),
    ),
    "block": Scaling(
        "one for each 128 values along that axis; weights: 128 x 128",
        (1, 128),
        (*_POWERS, "exact", "fit", "two_level"),
        free=True,
    ),
    "mx": Scaling(
        "E8M0, one for each 32 values along that axis",
        (1, 32),
        (*_POWERS, "error", "quest"),
        free=True,
    ),
    "nv": Scaling(
        "e4m3 times one float32 for the tensor, one for each 16 values along that axis",
        (1, 16),
        ("e4m3", "e4m3_4_6", "e4m3_eden"),
        free=True,
    ),
}
"""Name -> which elements share a scale, and the rules that may compute it."""


def _largest(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """The largest magnitude over ``dims`` (kept); NaN if there is a NaN."""
    if dims is not None:
        return x.abs().amax(dims, keepdim=True)
    low, high = aten.aminmax.default(x)  # one pass, no copy
    return torch.maximum(-low, high)


def largest_finite(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """The largest magnitude of the finite values over ``dims`` (kept); 0 if there are none.

    If it can be checked without a device synchronization, the extra pass that excludes Inf and NaN
    runs only if there are any.
    """
    if type(x) is Tensor and reads_values(x):
        amax = _largest(x, dims)
        try:
            if bool(amax.amax() < torch.inf):
                return amax
        except RuntimeError:  # under vmap, or while tracing
            pass
    size = x.abs()
    size = torch.where(size < torch.inf, size, 0.0)
    return size.amax() if dims is None else size.amax(dims, keepdim=True)


def _defined(scale: Tensor, amax: Tensor) -> Tensor:
    """``scale`` clamped to its range; 1 where amax is zero, Inf or NaN."""
    usable = (amax > 0) & (amax < torch.inf)
    return torch.where(usable, scale.clamp(2.0**SMALLEST, 2.0**LARGEST), 1.0)


def scale_of(
    x: Tensor,
    dims: tuple[int, ...] | None,
    format: Format,
    rule: str,
    unit: Tensor | None = None,
) -> Tensor:
    """The scale factors of ``x``: one for all elements along ``dims`` (None: all of x).

    unit: of the scales of a rule in UNITS, 0-dim; None is `unit_of` x.

    Returns float32 (float64 for float64), with ``dims`` kept as 1, or 0-dim. It is computed from
    the finite values; Inf and NaN pass through the cast unchanged. It is 1 if the largest finite
    magnitude is zero. It is at least 2**-126, the smallest normal float32 (tiles below that times
    half the format's smallest value become zero), and at most 2**127, which only float64 exceeds. x
    must not be empty.

    A scale stored in eight bits (a rule in UNITS, or with suffix `E8M0`) is NaN if its tile has Inf
    or NaN, and so becomes the whole tile, because formats of four and six bits have neither.
    microxcaling does the same. torchao and the OCP specification agree for NaN (MX 1.0, section
    5.1); torchao treats Inf as a large number. E8M0 goes down to 2**-127.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    name, stored, _ = rule.partition(E8M0)
    x, in_eight_bits = x.detach(), bool(stored) or rule in UNITS
    if in_eight_bits:
        amax = _largest(x, dims).to(dtype)
        finite = amax < torch.inf
        amax = torch.where(finite, amax, 0.0)
    else:
        amax = largest_finite(x, dims).to(dtype)
        x = torch.where(x.abs() < torch.inf, x, 0.0) if name in (*BY_ERROR, *BY_SPREAD) else x
    if unit is None and rule in UNITS:
        unit = UNITS[rule](amax, format)
    size = _spread(x, dims, amax) if name in BY_SPREAD else amax
    scale = _by_rule(size, format, rule, unit)
    if name in BY_ERROR:
        more = BY_ERROR[name](amax).clamp(max=torch.finfo(dtype).max)
        other = _by_rule(more, format, rule, unit)
        better = _error(x, dims, format, other, scale) < _error(x, dims, format, scale, scale)
        scale = torch.where(better, other, scale)
    return torch.where(finite, scale, torch.nan) if in_eight_bits else scale


def _spread(x: Tensor, dims: tuple[int, ...] | None, amax: Tensor) -> Tensor:
    """The standard deviation over ``dims`` of what has these largest magnitudes, and these where it
    is zero."""
    unit = torch.where(amax > 0, amax, 1.0)
    square = torch.var(x.to(amax.dtype) / unit, dims, correction=0, keepdim=dims is not None)
    return torch.where(square > 0, square.sqrt() * unit, amax)


def _by_rule(amax: Tensor, format: Format, rule: str, unit: Tensor | None) -> Tensor:
    """The scale of tiles with these amax, all finite. unit: of a rule in UNITS, else None."""
    name, stored, _ = rule.partition(E8M0)
    if not stored:
        scale = RULES[name](amax, format) if unit is None else RULES[name](amax, format, unit)
        return _defined(scale, amax)
    small = amax < 1.0
    amax = torch.where(small, 2 * amax, amax)  # the lower limit is halved
    scale = _defined(RULES[name](amax, format), amax)
    return torch.where(small & (amax > 0), scale / 2, scale)


def corrected(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    unit: Tensor,
    dims: tuple[int, ...],
    together: int,
) -> Tensor:
    """The scales of rule "e4m3_eden", which multiply the rounded values: unbiased along ``x``.

    With c = <x, x> / <x, Q(x)> of the tiles that are rotated together, c * Q(x) has the projection
    <x, x> on x, and after a random rotation the expected value x (EDEN, Vargaftik et al. 2022,
    arXiv:2108.08842). c multiplies the scales, which are rounded stochastically to e4m3. The
    published code of Quartet II takes both inner products of values divided by the scale of their
    tile, which is the same where these are equal.

    Args:
        x: divided by the scales; tiles in ``dims``, one dimension.
        values: ``x`` rounded to the format.
        scale, unit: of rule "e4m3_eden".
        together: the number of adjacent tiles that share c.

    Returns:
        As ``scale``; NaN in tiles where ``scale`` is NaN.
    """
    steps = scale / unit
    pairs = [(y * x).sum(dims, keepdim=True) * steps.square() for y in (x, values)]
    if together > 1:
        along = dims[0] - 1
        groups = [p.unflatten(along, (-1, together)) for p in pairs]
        pairs = [
            g.nansum(along, keepdim=True).expand_as(g).flatten(along - 1, along) for g in groups
        ]
    whole, projected = pairs
    factor = torch.where(projected > 0, whole / projected, 1.0)
    how: Any = {"rounding": "stochastic", "overflow": "saturate", "random_bits": 31}
    return quantize_operand(steps * factor, get_format("e4m3"), **how) * unit


def _error(
    x: Tensor, dims: tuple[int, ...] | None, format: Format, scale: Tensor, by: Tensor
) -> Tensor:
    """The sum over ``dims`` of squared errors of rounding ``x`` to nearest, in units of ``by`` and
    the format's largest power of two."""
    x, by = x.detach().to(scale.dtype), by * 2.0**format.max_exponent
    how: Any = {"rounding": "nearest", "overflow": "saturate", "random_bits": 31}
    square = ((quantize_operand(x, format, scale=scale, **how) - x) / by).square()
    return square.sum() if dims is None else square.sum(dims, keepdim=True)


def with_margin(scale: Tensor, margin: int, rule: str) -> Tensor:
    """``scale * 2**margin``, clamped to the range of the rule's scales; NaN stays NaN."""
    low = SMALLEST - rule.endswith(E8M0)
    return (scale * 2.0**margin).clamp(2.0**low, 2.0**LARGEST) if margin else scale


def inverse_of(scale: Tensor, rule: str | None) -> Tensor | None:
    """The factor that replaces the division by ``scale``, a result of `scale_of`; None: divide.

    A static scale (no rule) is a normal power of two and so is its inverse; a multiplication is
    cheaper than a division. 2**-127 is
    a subnormal float32, which some devices and modes flush to zero. The largest scale of a float32
    is 2**126, as the formats reach beyond 2, so its inverse is normal.
    """
    if rule is None:
        return 1 / scale
    if not rule.endswith(E8M0):
        return None
    return torch.where(scale < 2.0**SMALLEST, 2.0 ** -(SMALLEST - 1), 1 / scale)


def scale_of_number(amax: float, format: Format) -> float:
    """`scale_of` by the rule "up", in float64, for a largest magnitude known on the host."""
    if not 0 < amax < math.inf:
        return 1.0
    fraction, exponent = math.frexp(amax)
    top, largest = math.frexp(format.max)
    return 2.0 ** min(max(exponent - largest + (fraction > top), SMALLEST), LARGEST)


def in_format(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """``x / scale`` in the format's torch dtype, and the scale factor by the rule "up".

    x: float32, any shape. Rounded once, to nearest, ties to even. Inf becomes NaN if the format has
    no Inf.
    """
    assert format.dtype is not None
    scale = scale_of(x, None, format, "up") if x.numel() else x.new_ones(())
    units = x / scale
    if not format.infinity:  # torch's own casts disagree on Inf
        units = torch.where(units.isinf(), torch.nan, units)
    return units.to(format.dtype), scale


def delayed_scale(x: Tensor, history: Tensor, format: Format, rule: str, record: bool) -> Tensor:
    """The scale factor from the largest entry of ``history``; from ``x`` itself if that is zero.

    record: add the largest finite magnitude of x in front and drop the oldest entry. Range as in
    `scale_of`; values beyond it overflow as the cast specifies. history: (length,), float32, or the
    dtype that the model was cast to; updated in place.
    """
    now = largest_finite(x.detach(), None).float() if x.numel() else history.new_zeros(()).float()
    known = history.amax().float()
    used = torch.where(known > 0, known, now)
    scale = _defined(RULES[rule](used, format), used)
    if record:
        now = torch.where(now < torch.inf, now, 0.0)
        history.copy_(torch.cat([now[None], history[:-1]]))
    return scale


def second_moment(x: Tensor) -> Tensor:
    """The sum of squares of ``x``, 0-dim. In float64, where squares of float32 neither overflow nor
    underflow; in float32 on devices without float64."""
    if is_dtensor(x):
        return reduced(x, second_moment(part_of(x)), range(x.dim()), "sum")
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    return aten.linalg_vector_norm.default(x.detach(), dtype=dtype).square()


def nearest_power(moment: Tensor) -> Tensor:
    """The power of two nearest, in octaves, to the root of a mean square: 2**round(log2(RMS)).

    An operand divided by it has an RMS between 2**-0.5 and 2**0.5. Returns float32, clamped to the
    range of scales, and 0 where ``moment`` is zero, Inf or NaN.
    """
    exponent = (moment.log2() / 2).round().clamp(SMALLEST, LARGEST - 1)
    return torch.where((moment > 0) & (moment < torch.inf), exponent.exp2(), 0.0).float()


def _static_scale(x: Tensor, state: Tensor, record: bool) -> Tensor:
    """The scale factor that ``state`` holds; 1 if that is 0.

    state: shape () if it is set. Shape (1,) otherwise: while it is 0, the scale is computed from
    the finite values of ``x``, and stored if ``record`` is set and all of x is finite.
    """
    scale = state.float()
    if state.dim() and x.numel():
        x = x.detach()
        clean = torch.where(x.abs() < torch.inf, x, 0.0)
        now = nearest_power(second_moment(clean) / x.numel())
        now = torch.where(scale > 0, scale, now)
        if record:
            state.copy_(torch.where(second_moment(x) < torch.inf, now, scale))
        scale = now
    scale = scale.squeeze()
    return torch.where(scale > 0, scale, 1.0)


def history_scale(
    x: Tensor, history: Tensor, format: Format, rule: str | None, margin: int, record: bool
) -> Tensor:
    """The scale factor of ``x`` from the state of earlier passes, 0-dim, float32.

    history: with a rule, the amax history of scaling "delayed"; without, the scale of "static".
    """
    if rule is None:
        return _static_scale(x, history, record)
    return with_margin(delayed_scale(x, history, format, rule, record), margin, rule)


def scaled_tiles(x: Tensor, tile: Tile, axis: int) -> tuple[Tensor, tuple[int, ...] | None]:
    """``x`` with tiles as separate dimensions, and those dimensions; None if all of x is one tile.

    x: (..., rows, columns), not empty. axis: -1 or -2, the axis that the product sums over. A size
    that the tile does not divide is padded with zeros. A size smaller than the tile is one tile,
    without padding.
    """
    if tile == (0, 0):
        return x, None
    turned = tile if axis == -1 else tile[::-1]
    # At least 2 if a tile has more than one element, because the set of dimensions depends on it.
    rows, columns = [min(by, max(size, 2)) for size, by in zip(x.shape[-2:], turned, strict=True)]
    # As counts times sizes: a compiler can then prove divisibility under dynamic shapes.
    down, across = [
        -(-size // by) if by else 0 for size, by in zip(x.shape[-2:], (rows, columns), strict=True)
    ]
    below = down * rows - x.shape[-2] if rows else 0
    beside = across * columns - x.shape[-1] if columns else 0
    if below or beside:
        x = aten.constant_pad_nd.default(x, [0, beside, 0, below])
    dims: list[int] = []
    if columns > 1:
        x = torch.unflatten(x, -1, (across, columns))
    if columns != 1:
        dims.append(-1)
    row = -3 if columns > 1 else -2
    if rows > 1:
        x = torch.unflatten(x, row, (down, rows))
    if rows != 1:
        dims.append(row)
    return x, tuple(dims)
