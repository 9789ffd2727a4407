"""Where the scale of an operand comes from: what shares one (its tile), and the rule that finds it.

A scale is the value of one unit of the format: the operand stored is ``x / scale``. Powers of two
make that division exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.format import Format, get_format
from ..formats.quantize import quantize
from ..formats.rounding import LAYOUTS

__all__ = [
    "E8M0",
    "LARGEST",
    "RULES",
    "SCALINGS",
    "SMALLEST",
    "Scaling",
    "delayed_scale",
    "history_scale",
    "in_format",
    "inverse_of",
    "largest_finite",
    "nearest_power",
    "scale_of",
    "scaled_tiles",
    "second_moment",
    "unit_of",
    "with_margin",
]

aten = torch.ops.aten

Tile = tuple[int, int]
"""Elements that share a scale: (across, along) the axis that a product sums over; 0 is all."""

SMALLEST, LARGEST = -126, 127
"""The limits of a scale as exponents of two: float32's normal powers. E8M0 begins at 2**-127, and
static scales end at 2**126, so that their inverse is normal too."""

E8M0 = " e8m0"
"""What follows the name of a rule in a spec where scales are stored in E8M0: see `scale_of`."""


def _power(amax: Tensor, format: Format, carry: int) -> Tensor:
    """2**(e - E), for ``amax`` = m * 2**e and the format's largest value M * 2**E (m, M in [1, 2)).

    carry: what is added to the bits of ``amax``; from where that reaches the exponent on, e is one
    more. A subnormal amax counts as zero exponent bits, below every scale.
    """
    layout = LAYOUTS[amax.dtype]
    exponent = ((amax.view(layout.integer) + carry) >> layout.mantissa_bits) - format.max_exponent
    exponent = exponent.clamp(layout.bias - 126, layout.bias + 127)
    return (exponent << layout.mantissa_bits).view(amax.dtype)


def _one(amax: Tensor) -> int:
    """The step of the exponent in the bits of ``amax``."""
    return 1 << LAYOUTS[amax.dtype].mantissa_bits


def _up(amax: Tensor, format: Format) -> Tensor:
    """The smallest power of two under which nothing overflows (the "round up" of Mishra et al.,
    arXiv:2506.08027, torchao's RCEIL)."""
    layout = LAYOUTS[amax.dtype]
    top = layout.encode(format.max) & (_one(amax) - 1)
    return _power(amax, format, _one(amax) - 1 - top)


def _floor(amax: Tensor, format: Format) -> Tensor:
    """2**(e - E), e and E the exponents of amax and of the format's largest value: what is between
    that value and the next power of two saturates (OCP MX specification 1.0, section 6.3)."""
    return _power(amax, format, 0)


def _ceil(amax: Tensor, format: Format) -> Tensor:
    """As floor, of amax rounded up to a power of two (torchao's CEIL)."""
    return _power(amax, format, _one(amax) - 1)


def _even(amax: Tensor, format: Format) -> Tensor:
    """As floor, of amax rounded to the format's mantissa bits (torchao's EVEN)."""
    return _power(amax, format, _one(amax) >> (format.mantissa_bits + 1))


def _exact(amax: Tensor, format: Format) -> Tensor:
    """amax divided by the format's largest value, in float32: no power of two."""
    return amax / format.max


def _e4m3(amax: Tensor, format: Format) -> Tensor:
    """``exact``, rounded to e4m3 in units of the tensor's amax / (448 * the format's largest value)
    (NVFP4, arXiv:2509.25149, section 2). The e4m3 number is at least its smallest subnormal, 2**-9:
    TransformerEngine keeps subnormals, torchao goes down to 2**-6."""
    scale_format = get_format("e4m3")
    unit = _unit(amax, format)
    scale = quantize(amax / format.max / unit, scale_format)
    return scale.clamp(min=scale_format.min_subnormal) * unit


def _unit(amax: Tensor, format: Format) -> Tensor:
    """What the scales of tiles with these largest magnitudes, all finite, are multiples of."""
    whole = amax.amax()
    return _defined(whole / (get_format("e4m3").max * format.max), whole)


def unit_of(x: Tensor, dims: tuple[int, ...] | None, format: Format) -> Tensor:
    """What the scales of `scale_of` are multiples of by the rule "e4m3": 0-dim, in float32 (float64
    for float64). x must not be empty."""
    amax = _largest(x.detach(), dims).to(torch.promote_types(x.dtype, torch.float32))
    return _unit(torch.where(amax < torch.inf, amax, 0.0), format)


RULES: dict[str, Callable[[Tensor, Format], Tensor]] = {
    "up": _up,
    "floor": _floor,
    "ceil": _ceil,
    "even": _even,
    "exact": _exact,
    "e4m3": _e4m3,
}
"""Name -> function of (largest magnitude of a tile, format) giving its scale."""


class Scaling(NamedTuple):
    """A row of SCALINGS."""

    about: str
    tile: Tile
    """What shares a scale, where the cast does not say."""
    rules: tuple[str, ...]
    """The names in RULES that it may go by, the usual one first; none: scale one."""
    free: bool = False
    """Whether a cast may have another tile."""


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
        (*_POWERS, "exact"),
        free=True,
    ),
    "mx": Scaling("E8M0, one for each 32 values along that axis", (1, 32), _POWERS, free=True),
    "nv": Scaling(
        "e4m3 times one float32 for the tensor, one for each 16 values along that axis",
        (1, 16),
        ("e4m3",),
        free=True,
    ),
}
"""Name -> what shares a scale and how it may be found."""


def _largest(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """The largest magnitude over ``dims`` (kept), NaN where there is one."""
    if dims is not None:
        return x.abs().amax(dims, keepdim=True)
    low, high = aten.aminmax.default(x)  # one pass, no copy
    return torch.maximum(-low, high)


def largest_finite(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """The largest magnitude over ``dims`` (kept) of what is finite; 0 where nothing is.

    Where that can be seen without waiting for a device, the pass that leaves Inf and NaN out is
    made only if there are any.
    """
    if not torch.compiler.is_compiling() and x.device.type == "cpu" and type(x) is Tensor:
        amax = _largest(x, dims)
        try:
            if bool(amax.amax() < torch.inf):
                return amax
        except RuntimeError:  # under vmap, or while a graph is traced
            pass
    size = x.abs()
    size = torch.where(size < torch.inf, size, 0.0)
    return size.amax() if dims is None else size.amax(dims, keepdim=True)


def _defined(scale: Tensor, amax: Tensor) -> Tensor:
    """``scale`` within its limits, and 1 where amax is zero, Inf or NaN."""
    usable = (amax > 0) & (amax < torch.inf)
    return torch.where(usable, scale.clamp(2.0**SMALLEST, 2.0**LARGEST), 1.0)


def scale_of(x: Tensor, dims: tuple[int, ...] | None, format: Format, rule: str) -> Tensor:
    """The scales of ``x``, one for all that lies along ``dims`` (None: all of it).

    Returns float32 (float64 for float64), with ``dims`` kept as 1, or 0-dim. It is that of the
    finite values: Inf and NaN go into the cast beside them and stay what they are. It is 1 where
    the largest of these is zero, not less than 2**-126, the smallest normal float32 (a tile below
    that times half the format's smallest value becomes zero), and not more than 2**127, past which
    only float64 reaches. x must not be empty.

    A scale that is itself stored in eight bits, by the rule "e4m3" or one followed by `E8M0`, is
    NaN where its tile has Inf or NaN, and with it all of the tile, as formats of four and six bits
    have neither. So it is in microxcaling; torchao and the OCP specification agree for NaN (MX
    1.0, section 5.1), and torchao takes Inf for a large number. E8M0 goes down to 2**-127.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    name, stored, _ = rule.partition(E8M0)
    if not stored and rule != "e4m3":
        amax = largest_finite(x.detach(), dims).to(dtype)
        return _defined(RULES[name](amax, format), amax)
    amax = _largest(x.detach(), dims).to(dtype)
    finite = amax < torch.inf
    amax = torch.where(finite, amax, 0.0)
    small = amax < 1.0 if stored else torch.zeros_like(finite)  # twice as large, the limit is half
    amax = torch.where(small, 2 * amax, amax)
    scale = _defined(RULES[name](amax, format), amax)
    scale = torch.where(small & (amax > 0), scale / 2, scale)
    return torch.where(finite, scale, torch.nan)


def with_margin(scale: Tensor, margin: int, rule: str) -> Tensor:
    """``scale * 2**margin``, within the limits of the scales of a rule; NaN stays NaN."""
    low = SMALLEST - rule.endswith(E8M0)
    return (scale * 2.0**margin).clamp(2.0**low, 2.0**LARGEST) if margin else scale


def inverse_of(scale: Tensor, rule: str | None) -> Tensor | None:
    """What to multiply by instead of dividing by ``scale``, which `scale_of` found; None: divide.

    A static scale, without a rule, is a normal power of two, as its inverse is: in compiled code,
    which takes the inverse once for many elements, a product is less than a quotient.
    2**-127 is a subnormal float32, which some devices and modes take for zero. The largest scale of
    a float32 is 2**126, as the formats reach beyond 2: the inverse is a normal number.
    """
    if rule is None:
        return 1 / scale if torch.compiler.is_compiling() else None
    if not rule.endswith(E8M0):
        return None
    return torch.where(scale < 2.0**SMALLEST, 2.0 ** -(SMALLEST - 1), 1 / scale)


def scale_of_number(amax: float, format: Format) -> float:
    """`scale_of` by the rule "up" for a largest magnitude that the host knows, in float64."""
    if not 0 < amax < math.inf:
        return 1.0
    fraction, exponent = math.frexp(amax)
    top, largest = math.frexp(format.max)
    return 2.0 ** min(max(exponent - largest + (fraction > top), SMALLEST), LARGEST)


def in_format(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """``x`` in units of its scale, in the format's torch dtype; and the scale, by the rule "up".

    x: float32, any shape; rounded once, to the nearest, ties to even. Inf becomes NaN where the
    format has none.
    """
    assert format.dtype is not None
    scale = scale_of(x, None, format, "up") if x.numel() else x.new_ones(())
    units = x / scale
    if not format.infinity:  # torch's own casts do not agree on what Inf becomes
        units = torch.where(units.isinf(), torch.nan, units)
    return units.to(format.dtype), scale


def delayed_scale(x: Tensor, history: Tensor, format: Format, rule: str, record: bool) -> Tensor:
    """The scale of the largest entry of ``history``; of ``x`` itself while there is none.

    record: put the largest finite magnitude of x in front, for the passes to come, and let the
    oldest entry go. Limits as in `scale_of`; what is beyond the scale's range
    overflows as the cast says. history: (length,), float32 or, if a model was cast, rounded to
    what it was cast to; changed in place.
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
    """The sum of the squares of ``x``, 0-dim, in float64 (float32 on devices without it), where the
    squares of float32 neither overflow nor vanish."""
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    return aten.linalg_vector_norm.default(x.detach(), dtype=dtype).square()


def nearest_power(moment: Tensor) -> Tensor:
    """The power of two nearest, in octaves, to the root of a mean square: 2**round(log2(RMS)).

    An operand divided by it has RMS 2**-0.5 to 2**0.5. Returns float32, within the limits of a
    scale, and 0 where ``moment`` is zero, Inf or NaN.
    """
    exponent = (moment.log2() / 2).round().clamp(SMALLEST, LARGEST - 1)
    return torch.where((moment > 0) & (moment < torch.inf), exponent.exp2(), 0.0).float()


def _static_scale(x: Tensor, state: Tensor, record: bool) -> Tensor:
    """The scale that ``state`` holds, 1 where that is 0.

    Shape (): it is known. Shape (1,): while it is 0, the scale is that of the finite values of
    ``x``, which is kept if ``record`` says so and all of x is finite."""
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
    """The scale of ``x`` by what was kept of it in the passes before, 0-dim, in float32.

    With a rule that is the amax history of scaling "delayed", without one the scale of "static"."""
    if rule is None:
        return _static_scale(x, history, record)
    return with_margin(delayed_scale(x, history, format, rule, record), margin, rule)


def scaled_tiles(x: Tensor, tile: Tile, axis: int) -> tuple[Tensor, tuple[int, ...] | None]:
    """``x`` with its tiles as dimensions, and these dimensions; None where all of x is one tile.

    x: (..., rows, columns), not empty. axis: -1 or -2, the one that the product sums over.
    A size that the tile does not divide is filled up with zeros, so that the last tile is shorter;
    not so a smaller one, which is one tile.
    """
    if tile == (0, 0):
        return x, None
    turned = tile if axis == -1 else tile[::-1]
    # At least 2 where a tile is more than an element: which dimensions there are follows from it.
    rows, columns = [min(by, max(size, 2)) for size, by in zip(x.shape[-2:], turned, strict=True)]
    # Written as counts times sizes, which a compiler sees to be divisible where sizes are dynamic.
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
