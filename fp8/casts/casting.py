"""Casts an operand of a product, or its gradient: rotates it, scales it by tiles and rounds it.

An operand is a matrix or a batch of matrices; the product sums over axis -1 (its rows are
multiplied) or -2. Each process rounds its part of a DTensor by the scales of the whole.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

from ..common.compiler import eager_only, in_memory
from ..common.dtensor import (
    as_shard,
    check_whole,
    is_dtensor,
    part_of,
    reduced,
    unreduced,
)
from ..formats.quantize import DTYPES, check_dtype, operand_grid, round_values
from ..formats.random_bits import drawn_key
from ..formats.rounding import Grid, divided, saturated
from ..frame import FRAMES
from ..recipes import scaling
from ..recipes.cast import Cast, cast_of
from ..recipes.rules import FORM_OF, LARGEST, LOWERED, times_power
from ..recipes.scaling import scaled_tiles, scales_and_unit
from ..torch_internals import Arguments, Context
from ..torch_internals.autograd_functions import apply, same, unaliased
from ..torch_internals.decorators import in_graph
from .counts import (
    Label,
    Observed,
    Row,
    observe,
    passes,
    range_of_spots,
    write_spot,
)
from .rotation import rotated
from .scaled_tensor import dequantized

#: The classes of tensors without a behaviour of their own.
PLAIN = (Tensor, Parameter)


def cast_forward(
    x: Tensor,
    cast: Cast | None,
    axis: int = -1,
    history: Tensor | None = None,
    name: str = "",
    operand: str = "input",
) -> Tensor:
    """``x`` rounded under ``cast``, without its rotation, with a straight-through gradient; or,
    while `fp8.calibrate` measures, measured. name: of the product, for `fp8.stats`."""
    if cast is None:
        return x
    measurement = FRAMES.items[-1].measurement
    if measurement is not None:
        measurement.operand(history, x, cast)
        return x
    label = f"{name}|{operand}" if name else ""
    return _rounded_in_graph(x, cast.text, axis, history, label)


def cast_backward(
    x: Tensor,
    cast: Cast | None,
    history: Tensor | None,
    name: str,
) -> Tensor:
    """``x``, whose gradient is rounded under ``cast`` along axis -1, or measured."""
    if cast is None:
        return x
    measurement = FRAMES.items[-1].measurement
    if measurement is not None:
        return measurement.gradient(history, x, cast)
    label = f"{name}|grad" if name else ""
    return _round_gradient(x, history, cast.text, label)


@in_graph
def _round_gradient(
    x: Tensor,
    history: Tensor | None,
    token: str,
    label: str,
) -> Tensor:
    spec = cast_of(token, rotated=False)
    return apply(_RoundGradient, x, history, spec, label, written=history)


@in_graph
def _rounded_in_graph(
    x: Tensor,
    token: str,
    axis: int,
    history: Tensor | None,
    label: str,
) -> Tensor:
    spec = cast_of(token, rotated=False)
    y, _ = rounded(x, spec, axis, history, label=label)
    return y


def rounded(
    x: Tensor,
    spec: Cast,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`cast_values` with a straight-through gradient."""
    x = as_read(x)
    # In the forward mode too, where torch refuses an autograd function without ``jvp`` by name.
    differentiable = torch.is_grad_enabled() or _has_tangent(x)
    return cast_values(x, spec, *args, **kwargs, differentiable=differentiable)


def as_read(x: Tensor) -> Tensor:
    """``x``, plain or a DTensor without partial sums. Raises TypeError if it cannot be cast."""
    usual = type(x) in PLAIN and not x.is_nested
    if usual and x.dtype in DTYPES and x.layout == torch.strided:
        return x
    x = dequantized(x)
    check_dtype(x)
    if is_dtensor(x):
        # A sum of rounded parts is not the rounded sum.
        return unreduced(x)
    return x


def cast_values(
    x: Tensor,
    spec: Cast,
    axis: int = -1,
    history: Tensor | None = None,
    record: bool | None = None,
    signs: Tensor | None = None,
    *,
    differentiable: bool = False,
    label: Label = "",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``x``, from `as_read`, rotated and rounded under a cast, and the scale of all of it; None if
    that is 1 or each tile has its own. record: whether x enters the history (None: if gradients are
    recorded). signs: the `rotation_signs` of the product. differentiable: with a gradient. label:
    where the cast is reported; "": nowhere. scale: of all of x, if it is known."""
    if spec.hadamard:
        x = rotated(x, spec.hadamard, axis, signs)
    if scale is None and label:
        scale, label = _scale_and_label(x, spec, history, record, label)
    elif scale is None and spec.tile == (0, 0):
        scale = whole_scale(x, spec, history, record)
    if differentiable:
        return apply(_Round, x, scale, spec, axis, label), scale
    return _rounded(x, scale, spec, axis, label), scale


def _scale_and_label(
    x: Tensor,
    spec: Cast,
    history: Tensor | None,
    record: bool | None,
    label: Label,
) -> tuple[Tensor | None, Label]:
    """`whole_scale`, and where the cast is reported. In a pass that is not looked at that is
    nowhere, unless the scale is of an earlier pass and the spots of ``x`` are out of its range."""
    if not isinstance(label, Row):
        return whole_scale(x, spec, history, record), label
    if not label.look.is_spot:
        # A pass that is looked at may set a static scale anew.
        if history is not None and spec.stored_rule is None:
            before = history.detach().float().sum()  # of one element
            label = label._replace(before=before)
        return whole_scale(x, spec, history, record), label
    scale = whole_scale(x, spec, history, record)
    if history is None or not x.numel():
        return scale, ""
    if type(x) not in PLAIN and is_dtensor(x):
        x = part_of(x)
    if label.look.in_graph:
        write_spot(label, x, scale)
    elif not passes(x, scale, range_of_spots(spec.number_format)):
        return scale, label
    return scale, ""


@eager_only(False)
def _has_tangent(x: Tensor) -> bool:
    """Whether a forward-mode derivative is computed, for which torch refuses autograd functions."""
    return unpack_dual(x).tangent is not None


def whole_scale(
    x: Tensor,
    spec: Cast,
    history: Tensor | None = None,
    record: bool | None = None,
) -> Tensor | None:
    """The scale factor of all of ``x``, as `cast_values` returns it."""
    rule, format = spec.stored_rule, spec.number_format
    whole = rule is not None and spec.tile == (0, 0) and not LOWERED[rule].is_simulated
    if whole and type(x) is not Tensor and is_dtensor(x):
        x = _amax_of(x)
    if history is not None:
        scale = scaling.history_scale(x, history, format, rule, record)
    elif rule is None or not whole or not x.numel():
        return None
    else:
        scale, _ = scales_and_unit(x, None, format, LOWERED[rule])
    if spec.margin:
        return FORM_OF[rule].with_margin(scale, spec.margin)
    return scale


def one_scale(x: Tensor) -> Tensor:
    """1, 0-dim, in the dtype of the scale factors of ``x``."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.ones((), dtype=dtype, device=x.device)


@cache
def _grid_of(text: str, dtype: torch.dtype, scaled: bool) -> Grid:
    """The grid of the cast with this `Cast.text`, a string, which keeps its hash."""
    spec = cast_of(text)
    limits = (spec.overflow, dtype, scaled, spec.rounding)
    return operand_grid(spec.number_format, *limits)


def _rounded(
    x: Tensor,
    scale: Tensor | None,
    spec: Cast,
    axis: int,
    label: Label,
    of: Tensor | None = None,
) -> Tensor:
    """``x`` rounded and multiplied by its scales again; not differentiable. scale: of all of x, or
    None. of: the DTensor of which x is the local part; None for none."""
    if type(x) not in PLAIN and is_dtensor(x):
        return as_shard(x, _rounded(part_of(x), scale, spec, axis, label, x))
    if spec.stored_rule is not None and scale is None and x.numel():
        tiles = _in_tiles(x, spec, axis, of)
        if FORM_OF[spec.stored_rule].largest == LARGEST:
            y = tiles.values * tiles.scale
        else:
            y = times_power(tiles.values, tiles.scale)
        y = y.to(x.dtype)
        if y.shape != x.shape:
            y = untiled(y, x, spec.tile, axis)
        if label:
            scale = _scale_of_each(tiles, x, spec, axis)
    else:
        inverse = key = None
        if scale is not None:
            inverse = FORM_OF[spec.stored_rule].inverse(scale)
        if spec.rounding == "stochastic":
            key = drawn_key(x.device)
        grid = _grid_of(spec.text, x.dtype, scale is not None)
        y = round_values(x.detach().resolve_neg(), grid, scale, inverse, key)
    if label:
        observe(label, Observed(x, y, scale, spec.number_format))
    return y


class _Tiles(NamedTuple):
    """values: the numbers of the format in an operand, in the shape of `scaled_tiles`. scale: of
    each tile. unit: of a rule with one. dims: the dimensions of a tile."""

    values: Tensor
    scale: Tensor
    unit: Tensor | None
    dims: tuple[int, ...] | None


def _in_tiles(
    x: Tensor,
    spec: Cast,
    axis: int,
    of: Tensor | None = None,
    converts: bool = False,
) -> _Tiles:
    """``x``, not empty, under a cast with a scale for each tile. of: as in `_rounded`. converts: as
    in `quantized`."""
    assert spec.stored_rule is not None
    rule, format = LOWERED[spec.stored_rule], spec.number_format
    form, key = rule.form, None
    tiles: Tensor = x
    dims: tuple[int, ...] | None = (axis,)
    if spec.tile != (1, 0):
        tiles, dims = scaled_tiles(x, spec.tile, axis)
    if of is None:
        scale, unit = scales_and_unit(tiles, dims, format, rule, None, axis)
    else:
        scale, unit = _scales_of_part(tiles, dims, spec, axis, of)
    if spec.margin:
        scale = form.with_margin(scale, spec.margin)
    if spec.margin and unit is not None:
        unit = form.with_margin(unit, spec.margin)
    if converts:
        scale = in_memory(scale)
    units = tiles.detach().to(scale.dtype)
    if form.is_power and not form.is_narrow and not converts:
        units = units * scale.reciprocal()  # `in_units`, without calls
    else:
        units = in_units(units, scale, spec.stored_rule, stored=converts)
    grid = _grid_of(spec.text, units.dtype, False)
    if spec.rounding == "stochastic":
        key = drawn_key(x.device)
    if converts and spec.is_plain:
        # The conversion instruction of the device rounds, and treats overflow in its own way.
        values = saturated(units, tiles.detach(), grid)
    else:
        values = round_values(units.resolve_neg(), grid, key=key)
    if rule.correct is not None:
        together = max(spec.hadamard // spec.tile[1], 1)
        scale = rule.correct(units, values, scale, unit, dims, together)
    return _Tiles(values, scale, unit, dims)


def _scale_of_each(tiles: _Tiles, x: Tensor, spec: Cast, axis: int) -> Tensor:
    """The scale of each element of ``x``."""
    return untiled(tiles.scale.expand(tiles.values.shape), x, spec.tile, axis)


def in_units(
    x: Tensor,
    scale: Tensor,
    rule: str | None,
    stored: bool = False,
) -> Tensor:
    """``x / scale``, for a scale by this rule; exact if that is a power of two. stored: whether the
    inverse is."""
    form = FORM_OF[rule]
    inverse = form.inverse(scale)
    if inverse is None:
        return divided(x, scale)
    if stored:
        # A graph would compute it with each element.
        inverse = in_memory(inverse)
    if form.is_narrow:
        return form.times(x, inverse)
    return x * inverse


def _amax_of(x: Tensor) -> Tensor:
    """The largest finite magnitude of a whole DTensor, 0-dim, on every process; 0 without one."""
    local = part_of(x)
    amax = scaling.largest_finite(local, None) if local.numel() else local.new_zeros(())
    return reduced(x, amax, range(x.ndim), "max")


def _scales_of_part(
    tiles: Tensor,
    dims: tuple[int, ...] | None,
    spec: Cast,
    axis: int,
    of: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """`scales_and_unit` of tiles of the local part of the DTensor ``of``."""
    assert spec.stored_rule is not None
    unit, rule, format = None, LOWERED[spec.stored_rule], spec.number_format
    if rule.is_simulated:
        raise NotImplementedError(
            f"rule {rule.name!r} reads the values of whole tiles, and an operand is divided "
            "among processes; take a rule of the largest magnitude"
        )
    across, along = spec.tile
    if across > 1:
        check_whole(of, -3 - axis, across)
    if along > 1:
        check_whole(of, axis, along)
    if rule.unit is not None:
        amax = _amax_of(of)
        amax = amax.to(torch.promote_types(amax.dtype, torch.float32))
        unit = rule.unit_of(amax, format)
    elif 0 in spec.tile:
        tiles = reduced(of, scaling.largest_finite(tiles, dims), [axis], "max")
    return scales_and_unit(tiles, dims, format, rule, unit, axis)


def untiled(y: Tensor, x: Tensor, tile: tuple[int, int], axis: int) -> Tensor:
    """``y``, of the shape that `scaled_tiles` returns, in the shape of ``x``."""
    if y.shape == x.shape:
        return y
    rows, columns = tile if axis == -1 else tile[::-1]
    if columns > 1:
        y = y.flatten(-2)
    if rows > 1:
        y = y.flatten(-3, -2)
    return y[..., : x.shape[-2], : x.shape[-1]]


class _Round(Function):
    """`_rounded` with a straight-through gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        scale: Tensor | None,
        spec: Cast,
        axis: int,
        label: Label,
    ) -> Tensor:
        return unaliased(_rounded(x, scale, spec, axis, label))

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        # Activation checkpointing counts saved tensors: one that is empty lets it detect a segment
        # that is recomputed outside of its block.
        ctx.save_for_backward(output.new_empty((0,)))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


class _RoundGradient(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, history: Tensor | None, spec: Cast, label: str) -> Tensor:
        return same(x)

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        _, ctx.history, ctx.spec, ctx.label = inputs

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, _ = rounded(grad, ctx.spec, -1, ctx.history, record=True, label=ctx.label)
        return y, None, None, None


class QuantizedOperand(NamedTuple):
    """values: of the format, float32, (..., outer, inner), summed over inner. scale: float32,
    0-dim, (outer, 1), or one for each tile. unit: of scales in e4m3, 0-dim."""

    values: Tensor
    scale: Tensor
    unit: Tensor | None = None

    @property
    def mT(self) -> QuantizedOperand:
        """The transpose of an operand with one scale, or one for each square tile."""
        scale = self.scale.mT if self.scale.ndim else self.scale
        return QuantizedOperand(self.values.mT, scale, self.unit)


def _in_one_tile(
    x: Tensor, scale: Tensor | None, spec: Cast, converts: bool, stored: bool
) -> Tensor:
    """The numbers of the format in ``x``, of which all have one scale; None: 1. stored: as in
    `in_units`."""
    units, key = x, None
    if scale is not None:
        units = in_units(x, scale, spec.stored_rule, stored)
    grid = _grid_of(spec.text, units.dtype, False)
    if converts and spec.is_plain:
        return saturated(units.detach(), x.detach(), grid)
    if spec.rounding == "stochastic":
        key = drawn_key(x.device)
    return round_values(units.detach().resolve_neg(), grid, key=key)


def quantized(
    x: Tensor,
    spec: Cast,
    axis: int = -1,
    history: Tensor | None = None,
    record: bool = False,
    signs: Tensor | None = None,
    converts: bool = False,
    label: Label = "",
    scale: Tensor | None = None,
) -> QuantizedOperand:
    """``x``, or with axis -2 its transpose, in numbers of the format, as `cast_values` rounds it.
    converts: whether a conversion to the dtype of the format rounds the values. scale: of all of x,
    if it is known."""
    if spec.is_simulated:
        raise ValueError(
            f"products under rule {spec.rule!r}, which reads the values of tiles, are simulated"
        )
    if spec.hadamard:
        x = rotated(dequantized(x), spec.hadamard, axis, signs)
    x = dequantized(x, torch.float32)
    known = scale is not None
    if not known:
        scale, label = _scale_and_label(x, spec, history, record, label)
    converts = converts and spec.number_format.dtype is not None and not label
    unit = None
    if spec.stored_rule is not None and scale is None:
        tiles = _in_tiles(x, spec, axis, converts=converts)
        scale, unit = tiles.scale, tiles.unit
        if label:
            y = untiled(tiles.values * scale, x, spec.tile, axis)
            each = _scale_of_each(tiles, x, spec, axis)
            observe(label, Observed(x, y, each, spec.number_format))
        if spec.tile[1]:
            scale = scale.squeeze(tiles.dims or ())
        values = untiled(tiles.values, x, spec.tile, axis)
    else:
        stored = converts and spec.stored_rule is not None and not known
        if stored and scale is not None:
            # Each thread of the kernel would compute, and clamp, it again.
            scale = in_memory(scale)
        values = _in_one_tile(x, scale, spec, converts, stored)
        if label:
            y = values if scale is None else values * scale
            observe(label, Observed(x, y, scale, spec.number_format))
    if scale is None:
        scale = one_scale(x)
    result = QuantizedOperand(values, scale, unit)
    if axis == -2:
        return result.mT
    return result


def times(x: Tensor, factor: float) -> Tensor:
    """``factor * x``; ``x`` itself for 1."""
    if factor == 1:
        return x
    return x * factor
