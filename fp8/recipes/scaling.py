"""Scale factors of operands ``x / scale``: which elements share one (the tile), and its rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.compiler import compiled_as, eager_only, reads_values
from ..common.dtensor import is_dtensor, part_of, reduced
from ..common.validation import refuse_transformed
from ..formats.format import Format, get_format
from ..formats.quantize import in_dtype, quantize_operand
from ..formats.rounding import LAYOUTS
from .rules import BY_ERROR, E8M0, LARGEST, POWERS, RULES, SMALLEST, UNITS, defined

__all__ = ["SCALINGS", "Scaling", "Tile"]

aten = torch.ops.aten

Tile = tuple[int, int]
"""The elements that share a scale: (across, along) the axis that a product sums over; 0 is all."""


class Scaling(NamedTuple):
    """A row of SCALINGS. rules: names in RULES, the default first; none if no rule computes the
    scale. free: whether a cast may choose another tile."""

    about: str
    tile: Tile
    rules: tuple[str, ...]
    free: bool = False


_ANY = ("up", "floor", "exact")

SCALINGS: dict[str, Scaling] = {
    "unit": Scaling("1: the operand is expected to have RMS about 1", (0, 0), ()),
    "tensor": Scaling("one of its largest magnitude, now", (0, 0), _ANY),
    "delayed": Scaling("one of its largest magnitude in the last passes", (0, 0), _ANY),
    "static": Scaling("one power of two, from its RMS: `fp8.calibrate`", (0, 0), ()),
    "row": Scaling("one for each row along the summed axis: token, output channel", (1, 0), _ANY),
    "block": Scaling(
        "one for each 128 values along that axis; weights: 128 x 128", (1, 128), _ANY, free=True
    ),
    "mx": Scaling("E8M0, one for each 32 values along that axis", (1, 32), POWERS, free=True),
    "nv": Scaling(
        "e4m3 times one float32 for the tensor, one for each 16 values along that axis",
        (1, 16),
        tuple(rule for rule in RULES if rule in UNITS),
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


# A graph has one constant 0 for all layers. The partitioner takes what reads it in a late layer for
# expensive, and moves the magnitudes for the backward pass into the forward pass.
@compiled_as(lambda mask, x: torch.where(mask, x, mask.to(x.dtype)))
def _zero_where_not(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0)


def largest_finite(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """The largest magnitude of the finite values over ``dims`` (kept); 0 if there are none."""
    eager = type(x) is Tensor and not torch.compiler.is_dynamo_compiling()
    if eager and x.device.type == "cpu":
        amax = _largest(x, dims)
        with suppress(RuntimeError):  # under vmap, or while tracing
            if bool(amax.amax() < torch.inf):  # the usual case, without a mask
                return amax
    size = x.abs()
    size = _zero_where_not(size < torch.inf, size)
    return size.amax() if dims is None else size.amax(dims, keepdim=True)


def scale_of(x: Tensor, dims: tuple[int, ...] | None, format: Format, rule: str) -> Tensor:
    """The scale factors of `scales_and_unit`."""
    return scales_and_unit(x, dims, format, rule)[0]


def scales_and_unit(
    x: Tensor,
    dims: tuple[int, ...] | None,
    format: Format,
    rule: str,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The scale factors of the finite values of ``x``, not empty: one along ``dims``, kept as 1, or
    of all (None); from 2**-126 to 2**126; 1 for zeros. And their unit, 0-dim, for a rule in UNITS.

    A scale stored in eight bits (a rule in UNITS, or with suffix `E8M0`, which begins at 2**-127)
    is NaN if its tile has Inf or NaN, and so becomes the tile, as in microxcaling; torchao treats
    Inf as a large number (MX 1.0, section 5.1: NaN).
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    name, x = rule.removesuffix(E8M0), x.detach()
    if rule == name and rule not in UNITS:
        amax = largest_finite(x, dims).to(dtype)
        return defined(RULES[name](amax, format), amax), None
    amax = _largest(x, dims).to(dtype)
    finite = amax < torch.inf
    amax = torch.where(finite, amax, 0.0)
    if unit is None and rule in UNITS:
        unit = UNITS[rule](amax, format)
    scale = _by_rule(amax, format, rule, unit)
    if name in BY_ERROR:
        other = _by_rule((1.5 * amax).clamp(max=torch.finfo(dtype).max), format, rule, unit)
        better = _error(x, dims, format, other, scale) < _error(x, dims, format, scale, scale)
        scale = torch.where(better, other, scale)
    return torch.where(finite, scale, torch.nan), unit


def _by_rule(amax: Tensor, format: Format, rule: str, unit: Tensor | None) -> Tensor:
    """The scale of tiles with these amax, all finite. unit: of a rule in UNITS, else None."""
    name = rule.removesuffix(E8M0)
    scale = RULES[name](amax, format) if unit is None else RULES[name](amax, format, unit)
    return defined(scale, amax) if rule == name else torch.where(amax > 0, scale, 1.0)


def corrected(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    unit: Tensor,
    dims: tuple[int, ...],
    count: int,
) -> Tensor:
    """The scales of rule "e4m3_eden", unbiased along ``x``: times c = <x, x> / <x, Q(x)> of the
    ``count`` tiles that are rotated together (EDEN, arXiv:2108.08842), rounded stochastically to
    e4m3. x, values: in units of ``scale``, before and after rounding. dims: the one of a tile."""
    steps, along = scale / unit, dims[0] - 1

    def inner_product(y: Tensor) -> Tensor:
        products = (y * x).sum(dims, keepdim=True) * steps.square()
        if count == 1:
            return products
        groups = products.unflatten(along, (-1, count))
        return groups.nansum(along, keepdim=True).expand_as(groups).flatten(along - 1, along)

    whole, projected = inner_product(x), inner_product(values)
    factor = torch.where(projected > 0, whole / projected, 1.0)
    return quantize_operand(steps * factor, get_format("e4m3"), rounding="stochastic") * unit


def _error(
    x: Tensor, dims: tuple[int, ...] | None, format: Format, scale: Tensor, by: Tensor
) -> Tensor:
    """The squared error of ``x`` over ``dims``, in units of ``by`` and the largest power of two."""
    x, layout = x.detach().to(scale.dtype), LAYOUTS[scale.dtype]
    # In units of a power of two next to ``by``: an error of small numbers may be flushed to zero.
    unit = (by.view(layout.integer) & layout.infinity).view(by.dtype).reciprocal()
    x, scale, by = x * unit, scale * unit, by * unit * 2.0**format.max_exponent
    square = ((quantize_operand(x, format, scale=scale) - x) / by).square()
    return square.sum() if dims is None else square.sum(dims, keepdim=True)


def with_margin(scale: Tensor, margin: int, rule: str) -> Tensor:
    """``scale * 2**margin``, clamped to the range of the rule's scales; NaN stays NaN."""
    if not margin:
        return scale
    more, larger = rule.endswith(E8M0), scale * 2.0**margin
    if more:  # 2**-127 is subnormal, and may be flushed to zero
        larger = torch.where(scale < 2.0**SMALLEST, 2.0 ** (SMALLEST - 1 + margin), larger)
    return larger.clamp(2.0 ** (SMALLEST - more), 2.0 ** (LARGEST + more))


def inverse_of(scale: Tensor, rule: str | None) -> Tensor | None:
    """The factor that replaces the division by ``scale``, a power of two by its rule or without
    one; None for others. 2**-127 of E8M0 is subnormal, which some devices flush to zero."""
    if rule is None or rule in POWERS:
        return 1 / scale
    if not rule.endswith(E8M0):
        return None
    return torch.where(scale < 2.0**SMALLEST, 2.0 ** (1 - SMALLEST), 1 / scale)


def times_power(x: Tensor, power: Tensor) -> Tensor:
    """``x * power``, for powers of two from 2**-127 to 2**127. The first is subnormal, and zero for
    CPUs under torch.set_flush_denormal(True) and for other devices: two factors are not."""
    if x.device.type == "cuda":  # which keeps subnormal numbers, in graphs too
        return x * power
    if reads_values(power):
        with suppress(RuntimeError):  # under vmap
            if bool((power >= 2.0**SMALLEST).all()):  # the usual case
                return x * power
    half = torch.where(power < 2.0**SMALLEST, 0.5, 1.0)
    return (x * half).mul_(power.clamp(min=2.0**SMALLEST))


def scale_of_number(amax: float, format: Format) -> float:
    """`scale_of` by the rule "up", in float64, for a largest magnitude known on the host."""
    if not 0 < amax < math.inf:
        return 1.0
    fraction, exponent = math.frexp(amax)
    top, largest = math.frexp(format.max)
    return 2.0 ** min(max(exponent - largest + (fraction > top), SMALLEST), LARGEST)


def in_format(x: Tensor, format: Format, tile: Tile = (0, 0)) -> tuple[Tensor, Tensor]:
    """float32 ``x / scale`` in the torch dtype of the format, rounded to nearest, and scales by
    rule "up": 0-dim, or one for each tile along axis -1. Inf is NaN if the format has no Inf."""
    grid = [] if tile == (0, 0) else grid_of(x.shape, tile)
    scale = x.new_ones(grid)
    if x.numel():
        scale = scale_of(*scaled_tiles(x, tile, -1), format, "up").reshape(grid)
    units = x / widened(scale, x.shape, tile)
    if not format.infinity:  # torch's own casts disagree on Inf
        units = torch.where(units.isinf(), torch.nan, units)
    return in_dtype(units, format.dtype), scale


def _delayed_scale(x: Tensor, history: Tensor, format: Format, rule: str, record: bool) -> Tensor:
    """The scale from the largest entry of ``history``, (length,); from ``x`` itself if that may
    have no entries, (1, length). record: that of x, unless zero, becomes the first entry."""
    entries = history.view(-1)
    amax = entries.amax().float()
    if record or history.dim() > 1:
        now = largest_finite(x.detach(), None).float() if x.numel() else amax.new_zeros(())
    if history.dim() > 1:
        amax = torch.where((amax > 0) & (amax < torch.inf), amax, now)
    scale = defined(RULES[rule](amax, format), amax)
    if record:
        newest = torch.where(
            (now > 0) & (now < torch.inf), torch.cat([now[None], entries[:-1]]), entries
        )
        refuse_transformed(newest)
        history.copy_(newest.view_as(history))
    return scale


def second_moment(x: Tensor) -> Tensor:
    """The sum of squares, 0-dim, in float64 (float32 on devices without it)."""
    if is_dtensor(x):
        return reduced(x, second_moment(part_of(x)), range(x.dim()), "sum")
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    return aten.linalg_vector_norm.default(x.detach(), dtype=dtype).square()


def nearest_power(moment: Tensor) -> Tensor:
    """2**round(log2(RMS)) of a mean square, float32, clamped; 0 where it is zero, Inf or NaN."""
    exponent = (moment.log2() / 2).round().clamp(SMALLEST, LARGEST)
    return torch.where((moment > 0) & (moment < torch.inf), exponent.exp2(), 0.0).float()


def static_rms(format: Format) -> float:
    """The RMS that a static scale gives an operand: 16 in a format that reaches 2**15, such as
    e5m2, else 1. Gradients become smaller while a model trains, 1000 times and more where it fits
    its data, and numbers of 2**11 RMS are still in range."""
    return 16.0 if format.max_exponent >= 15 else 1.0


def _static_scale(x: Tensor, state: Tensor, rms: float, record: bool) -> Tensor:
    """The scale in ``state``; if that is not set, (1,), of ``x``, stored (record) if finite."""
    scale = state.float()
    if not state.dim():
        return _read(scale)
    if x.numel():
        x = x.detach()
        clean = _zero_where_not(x.abs() < torch.inf, x)
        now = nearest_power(second_moment(clean) / (x.numel() * rms**2))
        now = torch.where(scale > 0, scale, now)
        if record:
            stored = torch.where(second_moment(x) < torch.inf, now, scale)
            if not _is_set_outside(state, stored):
                refuse_transformed(stored)
                state.copy_(stored)
        scale = now
    scale = scale.squeeze()
    return torch.where(scale > 0, scale, 1.0)


@compiled_as(lambda state: state)
def _read(state: Tensor) -> Tensor:
    """A copy: products save their scales, and the state may change before their backward pass."""
    return state.clone()


@eager_only(False)
def _is_set_outside(state: Tensor, stored: Tensor) -> bool:
    """Whether ``state`` is set outside of a transform of `torch.func` that computes ``stored``."""
    if torch.func.debug_unwrap(stored) is stored:
        return False
    return bool((torch.func.debug_unwrap(state) > 0).all())


def history_scale(
    x: Tensor, history: Tensor, format: Format, rule: str | None, margin: int, record: bool
) -> Tensor:
    """The scale of ``x``, 0-dim: by a rule from the history of "delayed", or that of "static"."""
    if rule is None:
        return _static_scale(x, history, static_rms(format), record)
    return with_margin(_delayed_scale(x, history, format, rule, record), margin, rule)


def scaled_tiles(x: Tensor, tile: Tile, axis: int) -> tuple[Tensor, tuple[int, ...] | None]:
    """``x``, (..., rows, columns), not empty, with tiles as dimensions of their own, and these;
    None for one tile. Sizes are padded with zeros to a multiple; a smaller size is one tile."""
    if tile == (0, 0):
        return x, None
    sides = tile if axis == -1 else tile[::-1]
    # At least 2 if a tile has more than one element, because the set of dimensions depends on it.
    rows, columns = [min(by, max(size, 2)) for size, by in zip(x.shape[-2:], sides, strict=True)]
    # As counts times sizes: a compiler can then prove divisibility under dynamic shapes.
    down, across = [
        -(-size // by) if by else 0 for size, by in zip(x.shape[-2:], (rows, columns), strict=True)
    ]
    more_rows = down * rows - x.shape[-2] if rows else 0
    more_columns = across * columns - x.shape[-1] if columns else 0
    if more_rows or more_columns:
        x = aten.constant_pad_nd.default(x, [0, more_columns, 0, more_rows])
    row = -3 if columns > 1 else -2
    if columns > 1:
        x = torch.unflatten(x, -1, (across, columns))
    if rows > 1:
        x = torch.unflatten(x, row, (down, rows))
    return x, (*((-1,) if columns != 1 else ()), *((row,) if rows != 1 else ()))


def grid_of(shape: Sequence[int], tile: Tile) -> list[int]:
    """The shape of the scales of a tensor of ``shape``, one for each tile along axis -1."""
    counts = (-(-n // by) if by else 1 for n, by in zip(shape[-2:], tile, strict=True))
    return [*shape[:-2], *counts]


def widened(scale: Tensor, shape: Sequence[int], tile: Tile, broadcast: bool = False) -> Tensor:
    """``scale``, of tiles, for each element of ``shape``. broadcast: not repeated for one tile."""
    for dim, by in zip((-2, -1), tile, strict=True):
        if scale.ndim and by != 1 and not (broadcast and scale.shape[dim] == 1):
            scale = scale.repeat_interleave(by or shape[dim], dim).narrow(dim, 0, shape[dim])
    return scale
