"""Scale factors of operands ``x / scale``: which elements share one (the tile), and its rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.compiler import (
    compiled_as,
    eager_only,
    in_memory,
    reads_values,
    updates_states,
)
from ..common.dtensor import is_dtensor, part_of, reduced
from ..common.validation import refuse_transformed
from ..formats.format import Format
from ..formats.quantize import in_dtype, quantize_operand
from ..formats.rounding import LAYOUTS
from .rules import E8M0, LARGEST, LOWERED, RULES, SMALLEST, Rule

__all__ = ["SCALINGS", "Scaling", "Tile"]

aten = torch.ops.aten

Tile = tuple[int, int]
"""The elements that share a scale: (across, along) the axis that a product sums over; 0 is all."""

Dims = tuple[int, ...] | None
"""The dimensions over which elements share a scale; None: all."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A row of SCALINGS.

    Attributes:
        about: what it is.
        tile: the elements that share a scale; the usual one if a cast may choose another.
        forms: the `Rule.stored` of the rules that may compute the scale; none if no rule does.
        free: whether a cast may choose another tile.
        keeps_magnitudes: whether the scale follows from earlier passes, of which the largest
            magnitudes are known.
        in_e8m0: whether the scales are stored in E8M0.
    """

    about: str
    tile: Tile
    forms: tuple[str, ...] = ("power", "float32", "inverse", "inverse_bf16")
    free: bool = False
    keeps_magnitudes: bool = False
    in_e8m0: bool = False

    @property
    def rules(self) -> tuple[str, ...]:
        """The names in RULES of the rules that may compute the scale, the default first."""
        return tuple(name for name, rule in RULES.items() if self.has(rule))

    def has(self, rule: Rule) -> bool:
        """Whether the rule may compute the scale."""
        refused = self.keeps_magnitudes and rule.is_simulated
        return rule.stored in self.forms and not refused

    def lowered(self, rule: str | None) -> str | None:
        """The name in LOWERED of a rule of this scaling."""
        if self.in_e8m0:
            return f"{rule}{E8M0}"
        return rule


SCALINGS: dict[str, Scaling] = {
    "unit": Scaling(
        about="1: the operand is expected to have RMS about 1",
        tile=(0, 0),
        forms=(),
    ),
    "tensor": Scaling(
        about="one for the tensor, from its largest magnitude in this pass",
        tile=(0, 0),
    ),
    "delayed": Scaling(
        about="one for the tensor, from its largest magnitude in the last passes",
        tile=(0, 0),
        keeps_magnitudes=True,
    ),
    "static": Scaling(
        about="a power of two for the tensor, measured from its RMS: `fp8.calibrate`",
        tile=(0, 0),
        forms=(),
    ),
    "row": Scaling(
        about="one for each row along the summed axis: token, output channel",
        tile=(1, 0),
    ),
    "block": Scaling(
        about="one for each 128 values along that axis; weights: 128 x 128",
        tile=(1, 128),
        free=True,
    ),
    "mx": Scaling(
        about="E8M0, one for each 32 values along that axis",
        tile=(1, 32),
        forms=("power",),
        free=True,
        in_e8m0=True,
    ),
    "nv": Scaling(
        about="e4m3, one for each 16 values along that axis, times one float32 for the tensor",
        tile=(1, 16),
        forms=("e4m3",),
        free=True,
    ),
}
"""Name -> which elements share a scale, and the rules that may compute it."""


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude, 0-dim; NaN if there is a NaN."""
    low, high = aten.aminmax.default(x)  # one pass, no copy
    return torch.maximum(-low, high)


def _largest(x: Tensor, dims: Dims) -> Tensor:
    """The largest magnitude over ``dims`` (kept), or of all."""
    if dims is None:
        return largest_magnitude(x)
    return x.abs().amax(dims, keepdim=True)


# A graph has one constant 0 for all layers. The partitioner takes what reads it in a late layer for
# expensive, and moves the magnitudes for the backward pass into the forward pass. The zero of
# ``mask.to(x.dtype)`` is computed for each element, in a loop that is not unrolled (9.0
# instructions for 6.3, and one load at a time: sm_90, torch 2.14).
@compiled_as(lambda mask, x: torch.where(mask, x, (mask ^ mask).to(x.dtype)))
def _zero_where_not(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0)


def largest_finite(x: Tensor, dims: Dims) -> Tensor:
    """The largest magnitude of the finite values over ``dims`` (kept); 0 if there are none."""
    eager = type(x) is Tensor and not torch.compiler.is_dynamo_compiling()
    if eager and x.device.type == "cpu":
        # Without a call of `_largest`: casts of small products wait for Python.
        amax = x.abs().amax(dims, keepdim=True) if dims else largest_magnitude(x)
        try:
            if bool(amax.amax() < torch.inf):  # the usual case, without a mask
                return amax
        except RuntimeError:  # under vmap, or while tracing
            pass
    size = x.abs()
    size = _zero_where_not(size < torch.inf, size)
    if dims is None:
        return size.amax()
    return size.amax(dims, keepdim=True)


def scale_of(x: Tensor, dims: Dims, format: Format, rule: str) -> Tensor:
    """The scale factors of `scales_and_unit`, by the name of the rule in LOWERED."""
    return scales_and_unit(x, dims, format, LOWERED[rule])[0]


def scales_and_unit(
    x: Tensor,
    dims: Dims,
    format: Format,
    rule: Rule,
    unit: Tensor | None = None,
    axis: int = -1,
) -> tuple[Tensor, Tensor | None]:
    """The scale factors of the finite values of ``x``, not empty: one along ``dims``, kept as 1, or
    of all (None); from 2**-126 to 2**126; 1 for zeros; and their unit, 0-dim, for a rule with one.
    Scales of a narrow `Form` are NaN for a tile with Inf or NaN; scales in E8M0 begin at 2**-127.
    axis: the one that a product sums over, for a rule that reads values."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.detach()
    finite = None
    if rule.form.is_narrow:
        amax = _largest(x, dims).to(dtype)
        finite = amax < torch.inf
        amax = torch.where(finite, amax, 0.0)
    else:
        amax = largest_finite(x, dims).to(dtype)
    if rule.magnitude is not None:
        amax = _by_values(x.to(dtype), dims, format, rule, amax, axis)
    if unit is None and rule.unit is not None:
        unit = rule.unit_of(amax, format)
    scale = rule.scale_of(amax, format, unit)
    if len(rule.candidates) > 1:
        scale = _best(x, dims, format, rule, amax, unit, scale)
    if finite is not None:
        scale = torch.where(finite, scale, torch.nan)
    return scale, unit


def _best(
    x: Tensor,
    dims: Dims,
    format: Format,
    rule: Rule,
    amax: Tensor,
    unit: Tensor | None,
    first: Tensor,
) -> Tensor:
    """The scale of the candidate with the smallest error in each tile. first: of the first one."""
    best = first
    least = _error(x, dims, format, first, first)
    for candidate in range(1, len(rule.candidates)):
        scale = rule.scale_of(amax, format, unit, candidate)
        error = _error(x, dims, format, scale, first)
        better = error < least
        best = torch.where(better, scale, best)
        least = torch.where(better, error, least)
    return best


def _by_values(
    x: Tensor,
    dims: Dims,
    format: Format,
    rule: Rule,
    amax: Tensor,
    axis: int,
) -> Tensor:
    """The magnitudes of `Rule.magnitude`, as ``amax``, the largest ones, which replace what is
    zero or not finite."""
    assert rule.magnitude is not None
    values = _as_matrices(_zero_where_not(x.abs() < torch.inf, x), dims, axis)
    found = rule.magnitude(values, format)
    one = found.dim() == values.dim() and found.shape[-2] == 1
    if not one or found.shape[-1] not in (1, values.shape[-1]):
        needs = f"of {tuple(values.shape)}, with 1 in place of the last two sizes or of the first"
        raise ValueError(
            f"Rule.magnitude of {rule.name!r} gave {tuple(found.shape)} {needs}"
        )
    if found.shape[-1] != 1 and dims == (axis,):  # tiles of one row
        gives = f"rule {rule.name!r} gives each place along the sum a scale"
        raise ValueError(
            f"{gives}, which in a tile of one row is each element; take a larger tile"
        )
    found = _as_tiles(found, dims, axis).to(amax.dtype)
    return torch.where((found > 0) & (found < torch.inf), found, amax)


def _as_matrices(x: Tensor, dims: Dims, axis: int) -> Tensor:
    """``x``, with tiles along ``dims`` as `scaled_tiles` has them, with the matrix of each tile in
    the last two dimensions, the summed one last."""
    if dims is None:
        return (x.mT if axis == -2 else x).flatten(0, -2)
    if dims == (-1,):
        x = x.unsqueeze(-2)
    elif dims == (-2,):
        x = x.mT.unsqueeze(-1)
    else:
        x = x.movedim(dims[1], -2)
    if axis == -2:
        return x.mT
    return x


def _as_tiles(x: Tensor, dims: Dims, axis: int) -> Tensor:
    """The inverse of `_as_matrices`, for results of size 1 across a tile, and maybe along it."""
    if axis == -2:
        x = x.mT
    if dims is None:
        return x.squeeze() if x.numel() == 1 else x
    if dims == (-1,):
        return x.squeeze(-2)
    if dims == (-2,):
        return x.squeeze(-1).mT
    return x.movedim(-2, dims[1])


def _error(x: Tensor, dims: Dims, format: Format, scale: Tensor, by: Tensor) -> Tensor:
    """The squared error of ``x`` over ``dims``, in units of ``by`` and the largest power of two."""
    x = x.detach().to(scale.dtype)
    layout = LAYOUTS[scale.dtype]
    # In units of a power of two next to ``by``: an error of small numbers may be flushed to zero.
    unit = (by.view(layout.integer) & layout.infinity).view(by.dtype).reciprocal()
    x = x * unit
    scale = scale * unit
    by = by * unit * 2.0**format.max_exponent
    square = ((quantize_operand(x, format, scale=scale) - x) / by).square()
    if dims is None:
        return square.sum()
    return square.sum(dims, keepdim=True)


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


#: The entries of a history up to which one kernel finds the magnitude and writes all entries: it
#: reads the magnitudes of rows once for each. (Transformer Engine's histories have 1024.)
ONE_KERNEL = 16

ROWS = 8192
"""The number of rows up to which each has a magnitude of its own, as a norm before the cast finds
them: the largest of more of them takes two kernels, as that of all elements does."""


def _delayed_on_gpu(
    x: Tensor, history: Tensor, format: Format, rule: str, record: bool
) -> Tensor:
    """`_delayed_scale` for GPUs, in three kernels: a Llama block has 108 in all, for 133."""
    entries, is_unset = history, history.dim() > 1
    if is_unset:
        entries = history.view(-1)
    amax = entries.amax().float()
    if not x.numel() or not (record or is_unset):
        return RULES[rule].scale_of(amax, format)
    size = x.detach().abs()
    rows = _zero_where_not(size < torch.inf, size)
    dims = () if x.shape[:-1].numel() > ROWS else (-1,)
    rows = rows.amax(dims).flatten()
    now = rows.amax().float()
    if is_unset:
        amax = torch.where((amax > 0) & (amax < torch.inf), amax, now)
    # The scale waits for the magnitudes, of which it gets 0 times one: a kernel that found them
    # while it casts would store the transposed copy byte by byte (in a Llama block 302 us, for 52
    # and 60 of two kernels, by the forecast).
    amax = torch.add(amax, rows[0], alpha=0.0).float()
    scale = RULES[rule].scale_of(amax, format)
    if record:
        _record(rows, now, entries)
    return scale


def _record(rows: Tensor, now: Tensor, entries: Tensor) -> None:
    """Makes ``now``, the largest of rows, unless zero, the first of the entries. By few operations:
    the partitioner saves a cast whose source was computed more than 100 operations before."""
    count = entries.numel()
    if count <= ONE_KERNEL:
        now = rows.expand(count, -1).amax(1).float()
    # No kernel reads a history shifted and writes it: that of the scale makes a copy, which of
    # `clone` it would not. (Entries are not negative.)
    known = in_memory(entries.abs())
    # By indices: the partitioner takes `torch.cat` for the end of what it computes again.
    place = torch.arange(count, device=entries.device)
    newest = torch.where(place > 0, known[(place - 1).clamp(min=0)], now)
    is_new = now > 0
    if rows.dtype == torch.float64:
        is_new = is_new & (now < torch.inf)
    newest = torch.where(is_new, newest, known)
    refuse_transformed(newest)
    entries.copy_(newest)


def _delayed_scale(
    x: Tensor, history: Tensor, format: Format, rule: str, record: bool
) -> Tensor:
    """The scale from the largest entry of ``history``, (length,); from ``x`` itself if the history
    may have no entries, (1, length). record: whether the largest magnitude of x, unless it is zero,
    becomes the first entry."""
    entries = history.view(-1)
    amax = entries.amax().float()
    now = amax.new_zeros(())
    if x.numel() and (record or history.dim() > 1):
        now = largest_finite(x.detach(), None).float()
    if history.dim() > 1:
        amax = torch.where((amax > 0) & (amax < torch.inf), amax, now)
    scale = RULES[rule].scale_of(amax, format)
    if record:
        newest = torch.cat([now[None], entries[:-1]])
        newest = torch.where((now > 0) & (now < torch.inf), newest, entries)
        refuse_transformed(newest)
        history.copy_(newest.view_as(history))
    return scale


def _delayed_compiled(
    x: Tensor, history: Tensor, format: Format, rule: str, record: bool
) -> Tensor:
    """`_delayed_scale` in a graph. On a CPU it is faster to keep casts, by 7 % of a small step."""
    if x.device.type == "cpu":
        return _delayed_scale(x, history, format, rule, record)
    return _delayed_on_gpu(x, history, format, rule, record)


_delayed = compiled_as(_delayed_compiled)(_delayed_scale)


def second_moment(x: Tensor) -> Tensor:
    """The sum of squares, 0-dim, in float64 (float32 on devices without it)."""
    if is_dtensor(x):
        return reduced(x, second_moment(part_of(x)), range(x.dim()), "sum")
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    return aten.linalg_vector_norm.default(x.detach(), dtype=dtype).square()


def nearest_power(moment: Tensor) -> Tensor:
    """2**round(log2(RMS)) of a mean square, float32, clamped; 0 where it is zero, Inf or NaN."""
    power = (moment.log2() / 2).round().clamp(SMALLEST, LARGEST).exp2()
    return torch.where((moment > 0) & (moment < torch.inf), power, 0.0).float()


def static_rms(format: Format) -> float:
    """The RMS that a static scale gives an operand: 16 in a format that reaches 2**15, such as
    e5m2, else 1. Gradients become smaller while a model trains, 1000 times and more where it fits
    its data, and numbers of 2**11 RMS are still in range."""
    if format.max_exponent >= 15:
        return 16.0
    return 1.0


#: The octaves by which an operand moves before its static scale is set anew. e4m3 has 18, e5m2 32:
#: a move by MOVED costs no accuracy, and scales that stay make the passes of a model equal.
MOVED = 6.0


def _measured_scale(x: Tensor, moment: Tensor, scale: Tensor, format: Format) -> Tensor:
    """``scale``; or the finite scale of ``x`` where ``scale`` is not set, where ``x`` saturates, or
    where it has moved by `MOVED`. moment: the sum of squares of x."""
    now = nearest_power(moment / (x.numel() * static_rms(format) ** 2))
    largest = _largest_of(x)
    # The least power of two at which nothing saturates, for operands with few large elements.
    least = (largest / format.max).log2().ceil().clamp(SMALLEST, LARGEST).exp2()
    now = torch.where(now > 0, torch.maximum(now, least), now)
    octaves = (now.log2() - scale.log2()).abs()
    stale = (scale <= 0) | (largest > scale * format.max) | (octaves > MOVED)
    return torch.where(stale & (now > 0), now, scale)


def _largest_of(x: Tensor) -> Tensor:
    """The largest magnitude of ``x``, finite and not empty, 0-dim, float32."""
    if is_dtensor(x):
        return reduced(x, _largest_of(part_of(x)), range(x.dim()), "max")
    if not x.numel():  # of a process that has no part of it
        return x.new_zeros((), dtype=torch.float32)
    return largest_magnitude(x.detach()).float()


def _is_finite(moment: Tensor) -> bool:
    """Whether a sum is known to be finite without synchronization."""
    if not reads_values(moment):
        return False
    try:
        return bool(moment < torch.inf)
    except RuntimeError:  # under vmap, or while tracing
        return False


def _static_scale(
    x: Tensor, state: Tensor, format: Format, record: bool | None
) -> Tensor:
    """The scale in ``state``. If that has a dimension, (1,), it is measured of ``x`` as in
    `_measured_scale`, and stored (record) if finite."""
    scale = state.float()
    if not state.dim():
        if type(state) is Tensor:
            # Products save their scales, and the state may change before their backward pass. A
            # graph, which has another type here, stores what it saves.
            scale = scale.clone()
        return scale
    if record is None:
        record = updates_states()
    if x.numel():
        x = x.detach()
        moment = second_moment(x)
        if _is_finite(moment):  # the usual case, without three passes over memory
            now = _measured_scale(x, moment, scale, format)
        else:
            clean = _zero_where_not(x.abs() < torch.inf, x)
            now = _measured_scale(clean, second_moment(clean), scale, format)
        if record:
            stored = torch.where(moment < torch.inf, now, scale)
            if not _is_set_outside(state, stored):
                refuse_transformed(stored)
                state.copy_(stored)
        scale = now
    scale = scale.squeeze()
    return torch.where(scale > 0, scale, 1.0)


@eager_only(False)
def _is_set_outside(state: Tensor, stored: Tensor) -> bool:
    """Whether ``state`` is set outside of a transform of `torch.func` that computes ``stored``."""
    if torch.func.debug_unwrap(stored) is stored:
        return False
    return bool((torch.func.debug_unwrap(state) > 0).all())


def history_scale(
    x: Tensor,
    history: Tensor,
    format: Format,
    rule: str | None,
    record: bool | None,
) -> Tensor:
    """The scale of ``x``, 0-dim: by a rule from the history of "delayed", or the static scale.
    record: whether ``x`` changes the state; None: if gradients are recorded."""
    if rule is None:
        return _static_scale(x, history, format, record)
    if record is None:
        record = updates_states()
    return _delayed(x, history, format, rule, record)


def scaled_tiles(x: Tensor, tile: Tile, axis: int) -> tuple[Tensor, Dims]:
    """``x``, (..., rows, columns), not empty, with tiles as dimensions of their own, and these;
    None for one tile. Sizes are padded with zeros to a multiple; a smaller size is one tile."""
    if tile == (0, 0):
        return x, None
    sides = tile if axis == -1 else tile[::-1]
    height, width = x.shape[-2:]
    # At least 2 if a tile has more than one element, because the set of dimensions depends on it.
    rows = min(sides[0], max(height, 2))
    columns = min(sides[1], max(width, 2))
    # As counts times sizes: a compiler can then prove divisibility under dynamic shapes.
    down = across = more_rows = more_columns = 0
    if rows:
        down = -(-height // rows)
        more_rows = down * rows - height
    if columns:
        across = -(-width // columns)
        more_columns = across * columns - width
    if more_rows or more_columns:
        x = aten.constant_pad_nd.default(x, [0, more_columns, 0, more_rows])
    row = -3 if columns > 1 else -2
    if columns > 1:
        x = torch.unflatten(x, -1, (across, columns))
    if rows > 1:
        x = torch.unflatten(x, row, (down, rows))
    axes: tuple[int, ...] = ()
    if columns != 1:
        axes += (-1,)
    if rows != 1:
        axes += (row,)
    return x, axes


def grid_of(shape: Sequence[int], tile: Tile) -> list[int]:
    """The shape of the scales of a tensor of ``shape``, one for each tile along axis -1."""
    counts = (-(-n // by) if by else 1 for n, by in zip(shape[-2:], tile, strict=True))
    return [*shape[:-2], *counts]


def widened(
    scale: Tensor, shape: Sequence[int], tile: Tile, broadcast: bool = False
) -> Tensor:
    """``scale``, of tiles, for each element of ``shape``. broadcast: not repeated for one tile."""
    for dim, by in zip((-2, -1), tile, strict=True):
        if scale.ndim and by != 1 and not (broadcast and scale.shape[dim] == 1):
            scale = scale.repeat_interleave(by or shape[dim], dim)
            scale = scale.narrow(dim, 0, shape[dim])
    return scale
