"""Rounding to a grid, the inner loop of `fp8.quantize`, by exact operations: the same in eager and
compiled code on every device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.compiler import compiled_as
from ..torch_internals.decorators import in_graph
from ..torch_internals.running_calls import is_inductors

ROUNDINGS = ("nearest", "stochastic", "toward_zero")


class Layout(NamedTuple):
    """The storage layout of a floating-point dtype, and the integer dtype of the same size.
    infinity: the bits of +Inf, an exponent field of ones."""

    integer: torch.dtype
    mantissa_bits: int
    bias: int
    infinity: int

    def encode(self, value: float) -> int:
        """The bits of a nonnegative `value` that the layout represents exactly."""
        if math.isinf(value):
            return self.infinity
        if math.isnan(value):
            return self.infinity | 1 << (self.mantissa_bits - 1)
        fraction, exponent = math.frexp(value)
        field = max(exponent - 1 + self.bias, 1)
        steps = math.ldexp(fraction, exponent + self.bias + self.mantissa_bits - field)
        return ((field - 1) << self.mantissa_bits) + int(steps)


LAYOUTS = {
    torch.float32: Layout(torch.int32, 23, 127, 0xFF << 23),
    torch.float64: Layout(torch.int64, 52, 1023, 0x7FF << 52),
}
"""The dtypes in which rounding is computed: IEEE 754 binary32 and binary64."""


class Grid(NamedTuple):
    """The values that a tensor is rounded to, as plain numbers, which autograd functions accept."""

    mantissa_bits: int
    min_exponent: int
    largest: float
    beyond: float
    """The result for magnitudes above `largest`: `largest` itself (saturation), inf or nan."""
    negative_zero: bool
    random_bits: int = 31
    """The number of random bits in stochastic rounding; see `random_bits.fewer_bits`."""
    infinity: float | None = None
    """The result for +-Inf if finite values saturate: inf or nan; None: `largest`."""
    truncates: bool = False
    """Whether values are rounded toward zero. Then finite ones stop at `largest`, whatever is
    beyond (IEEE 754-2019, section 7.4)."""
    magic: float = 0.0
    """The factor of the number whose addition rounds, see `round_to_grid`; 0: it is not exact."""
    low: int = 0
    high: int = 0
    """The bits of the powers of two between which the grid has the spacing of ``magic``."""

    def in_dtype(self, dtype: torch.dtype) -> Grid:
        """The grid with `magic` for tensors of a dtype, if there are bits to spare, and room above
        and below."""
        layout = LAYOUTS[dtype]
        top = math.frexp(self.largest)[1] - 1
        spare = layout.mantissa_bits - self.mantissa_bits
        has_room = top + spare < layout.bias
        is_fine = self.min_exponent - self.mantissa_bits - 31 > -layout.bias
        if self.truncates or spare < 2 or not has_room or not is_fine:
            return self
        low = (self.min_exponent + layout.bias) << layout.mantissa_bits
        high = (top + layout.bias) << layout.mantissa_bits
        return self._replace(magic=1.5 * 2.0**spare, low=low, high=high)


def divided(x: Tensor, by: Tensor | float) -> Tensor:
    """``x / by``, correctly rounded on every device: CUDA and Triton multiply by a reciprocal or
    divide by ``div.full.f32`` (PTX ISA, "div"), but `torch.addcdiv` becomes ``div.rn.f32``."""
    if x.device.type == "cpu":
        return x / by
    divisor = by if isinstance(by, Tensor) else x.new_full((), by)
    return torch.addcdiv(x.new_full((), -0.0), x, divisor)


def round_to_grid(x: Tensor, grid: Grid, bits: Tensor | None = None) -> Tensor:
    """`x`, float32 or float64, rounded to the values of `grid` in a new tensor: to nearest, toward
    zero if it `truncates`, or by the low 31 of random ``bits``. NaN stays NaN. Exact under
    torch.set_flush_denormal(True)."""
    layout = LAYOUTS[x.dtype]
    if bits is not None or not grid.magic:
        return _round_by_bits(x, grid, layout, bits)
    # Nearest, ties to even: adds and subtracts a number so large that the addition itself rounds.
    # With p the power of two at or below |x|, floats at 1.5 * p * 2**(23 - m) have the spacing of
    # the grid at x; 1.5 keeps sums of either sign in one binade.
    bits_of_power = x.view(layout.integer) & layout.infinity
    power = bits_of_power.clamp_(grid.low, grid.high).view(x.dtype)
    y = torch.add(x, power, alpha=grid.magic).sub_(power, alpha=grid.magic)
    if grid.beyond != grid.largest:
        y.mul_(torch.where(y.abs() > grid.largest, grid.beyond, 1.0))
    else:
        y.clamp_(-grid.largest, grid.largest)
        if grid.infinity is not None and math.isnan(grid.infinity):
            y.add_(x, alpha=0.0)  # Inf * 0 is NaN
        elif grid.infinity is not None:
            # Inf stays and finite values become zero: one pass instead of three with a mask.
            y.add_(torch.hardshrink(x, torch.finfo(x.dtype).max))
    if grid.negative_zero:
        return y.copysign_(x)
    return y


@compiled_as(lambda x: x.device.type != "cpu")
def makes_finite(x: Tensor) -> bool:
    """Whether a conversion makes Inf finite, as Triton's ``cvt.rn.satfinite.e5m2x2.f32`` (PTX ISA):
    in a graph, where Inf becomes NaN before it."""
    return False


_CUDA = torch.version.cuda is not None


@compiled_as(lambda x: _CUDA and x.device.type == "cuda")
def _is_for_cuda(x: Tensor) -> bool:
    return False


@in_graph
def _saturated_on_cuda(x: Tensor, unscaled: Tensor, largest: float) -> Tensor:
    """`saturated`. Triton's conversion (3.6 to 3.8, from compute capability 8.9 on) saturates, Inf
    too: ``cvt.rn.satfinite``. After ``min.NaN`` and ``max.NaN``, which a clamp becomes, an H100 may
    store transposed bytes that were never computed (triton-lang/triton issue 11111)."""
    y = x if is_inductors() else x.clamp(-largest, largest)
    return torch.add(y, unscaled, alpha=0.0)  # Inf * 0 is NaN


def saturated(x: Tensor, unscaled: Tensor, grid: Grid) -> Tensor:
    """Clamps finite values to `grid.largest`, for a conversion that rounds; nonfinite where
    ``unscaled`` is, of which ``x`` is a multiple. In a graph without Inf, which it makes NaN."""
    if _is_for_cuda(x):
        return _saturated_on_cuda(x, unscaled, grid.largest)
    # In place: the peak of an eager step is here, in the cast of its largest gradient.
    y = x.clamp(-grid.largest, grid.largest)
    if grid.infinity is None or math.isnan(grid.infinity) or makes_finite(x):
        return y.add_(unscaled, alpha=0.0)  # Inf * 0 is NaN
    infinite = torch.hardshrink(unscaled, torch.finfo(unscaled.dtype).max)
    return y.add_(infinite).copysign_(unscaled)


def _round_by_bits(
    x: Tensor,
    grid: Grid,
    layout: Layout,
    bits: Tensor | None,
) -> Tensor:
    """All roundings, on the bits of x, in integers alone. x is significand * 2**e; the low `drop`
    bits of the significand are below the spacing of the grid and decide about an increment."""
    width = layout.mantissa_bits
    raw = x.view(layout.integer)
    magnitude = raw & (layout.infinity | ((1 << width) - 1))
    exponent = magnitude >> width
    normal = exponent.clamp(max=1)
    significand = (magnitude & ((1 << width) - 1)) | (normal << width)
    drop = (grid.min_exponent + layout.bias - exponent).clamp_(min=0)
    drop = drop.add_(normal).add_(width - grid.mantissa_bits - 1)
    if grid.mantissa_bits == width:
        drop = drop.clamp_(min=0)
    up: Tensor | int = 0
    if not grid.truncates:
        up = _round_up(significand, drop, bits)
    # Below the spacing the result is 0 or one step. Above it, the bits of x including the exponent
    # count steps, and a carry into the exponent is correct.
    step = layout.encode(2.0 ** (grid.min_exponent - grid.mantissa_bits))
    shift = drop.clamp(max=width)
    rounded = torch.where(drop > width, up * step, ((magnitude >> shift) + up) << shift)
    return _finish_bits(raw, magnitude, rounded, grid, layout).view(x.dtype)


def _round_up(significand: Tensor, drop: Tensor, bits: Tensor | None) -> Tensor:
    """1 where `significand` without its low `drop` bits is incremented, else 0."""
    # The dropped bits as a fraction of 2**places. That truncates fractions below 2**-7 alone.
    places = significand.element_size() * 8 - 1
    fraction = significand << (places - drop).clamp_(min=0)
    fraction = (fraction >> (drop - places).clamp_(min=0)) & ((1 << places) - 1)
    if bits is None:
        odd = (significand >> drop) & 1
        up = fraction > (1 << (places - 1)) - odd
    else:
        up = (fraction >> (places - 31)) > (bits & 0x7FFFFFFF)
    return up.to(significand.dtype)


def _finish_bits(
    raw: Tensor,
    magnitude: Tensor,
    rounded: Tensor,
    grid: Grid,
    layout: Layout,
) -> Tensor:
    """The bits of the result: applies overflow, NaN and sign to the rounded magnitude."""
    largest = layout.encode(grid.largest)
    beyond = layout.encode(grid.beyond)
    if grid.truncates:  # only Inf overflows
        rounded = rounded.clamp_(max=largest)
        rounded = torch.where(magnitude < layout.infinity, rounded, beyond)
    else:
        rounded = torch.where(rounded > largest, beyond, rounded)
    special = layout.infinity + (grid.infinity is None)  # Inf and NaN, or NaN alone
    quiet = grid.infinity is not None and math.isnan(grid.infinity)
    other = magnitude | layout.encode(math.nan) if quiet else magnitude
    rounded = torch.where(magnitude >= special, other, rounded)
    sign = raw ^ magnitude
    if not grid.negative_zero:
        sign = torch.where(rounded == 0, 0, sign)
    return rounded | sign
