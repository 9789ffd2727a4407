"""Random bits from a counter, and rounding to a grid: the inner loops of `fp8.quantize`.

Everything here is plain torch arithmetic on integers and exact float operations, so that eager and
compiled code, on any device, give the same bits, and so that a compiler can fuse it with its
surroundings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)
Seed = int | Tensor | Sequence[int | Tensor]

Key = int | Tensor
"""64 random bits as a signed number: see `random_key`."""

ROUNDINGS = ("nearest", "stochastic", "toward_zero")


# --- random bits ------------------------------------------------------------------------------

FIRST, SECOND, THIRD = (0xED5AD4BB - 2**32, 0xAC4C1B51 - 2**32, 0x31848BAB)
"""Multipliers, as int32, of `triple32`, with shifts 17, 11, 15, 14: the 32-bit mixer with the least
avalanche bias found by Wellons' search (https://github.com/skeeto/hash-prospector; 0.0208, against
0.17 for two rounds)."""

KEY_STEP = 0x5851F42D4C957F2D
"""Multiplier that combines the parts of a seed: that of Knuth's MMIX generator, good in the
spectral test."""

KEY_START = 0x243F6A8885A308D3
"""Where a key starts: the first 64 bits of the fraction of pi."""

INDEX_BITS = 31
"""Elements are numbered within blocks of 2**31, so that an index is a non-negative int32."""


def _wrap(word: Word) -> Word:
    """A Python int modulo 2**64, as int64 arithmetic on tensors has it anyway."""
    return word if isinstance(word, Tensor) else ((word + 2**63) & (2**64 - 1)) - 2**63


def _mix64(word: Word) -> Word:
    """Stafford's variant 13 of the 64-bit murmur finaliser, as in SplitMix64 (Steele et al., OOPSLA
    2014).

    `>>` copies the sign, hence the masks. The multipliers are the published ones as signed 64-bit
    numbers.
    """
    word = _wrap((word ^ ((word >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64))
    word = _wrap((word ^ ((word >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64))
    return word ^ ((word >> 31) & (2**33 - 1))


def random_key(seed: Seed) -> Key:
    """A 64-bit key from a seed: an int, or a 0-dim int64 tensor where the seed holds a tensor.

    seed: an int in [-2**63, 2**63), a 0-dim int64 tensor, or a sequence of these such as (seed,
    step, stream). Each part counts: (1, 2), (2, 1) and (1, 2, 0) are unrelated.

    An int and a tensor of the same value give the same key. Raises TypeError and ValueError.
    """
    parts = list(seed) if isinstance(seed, Sequence) else [seed]
    for part in parts:
        _check_seed(part)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors or torch.compiler.is_compiling():
        # A compiled int may be symbolic, which bitwise operators do not take.
        device = tensors[0].device if tensors else None
        return _combine(torch.full((), KEY_START, dtype=torch.int64, device=device), parts)
    return _combine(KEY_START, parts)


def _halves(key: Key) -> tuple[Key, Key]:
    """The low and the high 32 bits of a key, as int32."""
    if isinstance(key, Tensor):
        return key.to(torch.int32), (key >> 32).to(torch.int32)
    return (key + 2**31) % 2**32 - 2**31, key >> 32


def _combine(start: Word, parts: list[int | Tensor]) -> Word:
    """One 64-bit word from the parts of a seed. The parts enter linearly and are mixed at the end.

    Few steps use their operand twice: inductor's time to compile a chain of those is exponential in
        its length.
    """
    word: Any = start
    for part in parts:
        word = _wrap(word * KEY_STEP + part)
    return _mix64(_wrap(word * KEY_STEP))


def _check_seed(part: object) -> None:
    if isinstance(part, Tensor):
        if part.dtype != torch.int64 or part.dim() != 0:
            raise TypeError(
                f"a seed tensor must be 0-dim int64, got {part.dtype} of shape {tuple(part.shape)}"
            )
    elif isinstance(part, bool) or not isinstance(part, int | torch.SymInt):
        raise TypeError(
            f"a seed is an int, a 0-dim int64 tensor or a sequence of these, got {part!r}"
        )
    elif not -(2**63) <= part < 2**63:
        raise ValueError(f"seed {part} does not fit into 64 bits")


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift right of int32 (torch's own shift copies the sign)."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)


def bits_from_key(
    shape: Sequence[int], key: Key, *, device: torch.device, start: int = 0
) -> Tensor:
    """int32 tensor of `shape`, all 32 bits random: a hash of `key` and the row-major index counted
    from `start`."""
    count = math.prod(shape)
    first, second = _halves(key)
    if start + count <= 1 << INDEX_BITS:
        z = torch.arange(start, start + count, dtype=torch.int32, device=device)
    else:
        index = torch.arange(start, start + count, device=device)
        z = (index & ((1 << INDEX_BITS) - 1)).to(torch.int32)
        second = (index >> INDEX_BITS).to(torch.int32).mul_(FIRST).bitwise_xor_(second)
    z = z ^ first
    z = z.bitwise_xor_(_shift(z, 17)).mul_(FIRST).add_(second)
    z = z.bitwise_xor_(_shift(z, 11)).mul_(SECOND)
    z = z.bitwise_xor_(_shift(z, 15)).mul_(THIRD)
    return z.bitwise_xor_(_shift(z, 14)).view(shape)


def key_at(key: Key, start: int) -> Key:
    """The key whose bits from 0 are those of ``key`` from ``start``, a multiple of a power of two:
    of as many elements as that, at most 2**31."""
    block, index = divmod(start, 1 << INDEX_BITS)
    return key ^ _wrap(index ^ (block * FIRST % 2**32 << 32))


def random_bits(shape: Sequence[int], seed: Seed, *, device: torch.device | str = "cpu") -> Tensor:
    """Random int32 tensor of `shape`: uniform over all 2**32 values, determined by the arguments.

    Element i is a hash of (seed, i), i the row-major index: the same in eager and compiled code, on
    every device, and whatever else draws random numbers. For seeds see `random_key`.
    """
    return bits_from_key(shape, random_key(seed), device=torch.device(device))


# --- rounding ---------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a torch dtype stores a float: the integer of the same size, its mantissa bits and
    exponent bias."""

    integer: torch.dtype
    mantissa_bits: int
    bias: int

    @property
    def infinity(self) -> int:
        """The bits of +Inf: all ones in the exponent field."""
        return (2 * self.bias + 1) << self.mantissa_bits

    def encode(self, value: float) -> int:
        """The bits of a non-negative `value` that this layout holds exactly."""
        if math.isinf(value):
            return self.infinity
        if math.isnan(value):
            return self.infinity | 1 << (self.mantissa_bits - 1)
        fraction, exponent = math.frexp(value)
        field = max(exponent - 1 + self.bias, 1)
        steps = math.ldexp(fraction, exponent + self.bias + self.mantissa_bits - field)
        return ((field - 1) << self.mantissa_bits) + int(steps)


LAYOUTS = {
    torch.float32: Layout(torch.int32, 23, 127),
    torch.float64: Layout(torch.int64, 52, 1023),
}
"""The dtypes rounding is computed in: IEEE 754 binary32 and binary64."""


class Grid(NamedTuple):
    """The values a tensor is rounded to, as plain numbers (which may cross an autograd
    function)."""

    mantissa_bits: int
    min_exponent: int
    largest: float
    beyond: float
    """What a magnitude above `largest` becomes: `largest` itself (saturation), inf or nan."""
    negative_zero: bool
    smallest: float
    """0, or where the format has no zero the smallest value, to which anything in [0, smallest)
    goes."""
    random_bits: int = 31
    """How many of the bits of stochastic rounding are random; see `fewer_bits`."""


def fewer_bits(bits: Tensor, count: int) -> Tensor:
    """The first `count` of the 31 bits that decide, with a one and zeros after them: the middle of
    what the missing bits could be, so that the error they cost averages out."""
    if count == 31:
        return bits
    return (bits & (2**31 - 2 ** (31 - count))) | 2 ** (30 - count)


def round_to_grid(
    x: Tensor,
    grid: Grid,
    rounding: str,
    *,
    bits: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """`x` rounded to the values of `grid`: a new tensor, or `out`.

    x: float32 or float64, any shape and strides.
    rounding: "nearest" (ties to even), "toward_zero", or "stochastic" (up with probability equal to
    the fraction of the step that `x` is above the lower neighbour, truncated to 31 bits).
    bits: for "stochastic", int32 like `x`; the low 31 bits are used.
    out, scratch: where to put the result (like `x`) and an intermediate (the integer of the same
    size).

    NaN stays NaN. +-Inf and whatever rounds beyond `grid.largest` becomes +-`grid.beyond`; toward
    zero, finite values stop at `grid.largest` (IEEE 754-2019, section 7.4). Exact under
    torch.set_flush_denormal(True).
    """
    layout = LAYOUTS[x.dtype]
    if not _fits_floats(grid, layout):
        return _round_by_bits(x, grid, layout, rounding, bits, out)
    if rounding == "nearest":
        return _round_by_magic(x, grid, layout, out, scratch)
    return _round_by_steps(x, grid, layout, rounding, bits, out)


def _fits_floats(grid: Grid, layout: Layout) -> bool:
    """Whether float operations are exact here: there is room above, and subnormals are far below
    every step.

    The two mantissa bits are for `_round_by_magic`; 2**-31 of a step is the least that stochastic
    rounding sees.
    """
    top = math.frexp(grid.largest)[1] - 1
    return (
        grid.smallest == 0.0
        and grid.mantissa_bits <= layout.mantissa_bits - 2
        and top + layout.mantissa_bits - grid.mantissa_bits < layout.bias
        and grid.min_exponent - grid.mantissa_bits - 31 > -layout.bias
    )


def _power(x: Tensor, grid: Grid, layout: Layout, scratch: Tensor | None) -> Tensor:
    """The bits of the power of two at or below |x|, kept within the exponents of the grid."""
    low = (grid.min_exponent + layout.bias) << layout.mantissa_bits
    high = (math.frexp(grid.largest)[1] - 1 + layout.bias) << layout.mantissa_bits
    power = torch.bitwise_and(x.view(layout.integer), layout.infinity, out=scratch)
    return power.clamp_(low, high)


def _round_by_magic(
    x: Tensor, grid: Grid, layout: Layout, out: Tensor | None, scratch: Tensor | None
) -> Tensor:
    """Nearest, ties to even: add and subtract a number so large that the float addition itself
    rounds.

    With p the power of two at or below |x|, the spacing of floats at 1.5 * p * 2**(23 - m) is that
    of the grid at x, on both sides: 1.5 keeps the sum of either sign inside one binade. The product
        in `alpha` is exact, so it
    does not matter whether it is fused.
    """
    magic = 1.5 * 2.0 ** (layout.mantissa_bits - grid.mantissa_bits)
    power = _power(x, grid, layout, scratch).view(x.dtype)
    y = torch.add(x, power, alpha=magic, out=out).sub_(power, alpha=magic)
    y = _overflow(y, x, grid, "nearest")
    return y.copysign_(x) if grid.negative_zero else y


def _round_by_steps(
    x: Tensor, grid: Grid, layout: Layout, rounding: str, bits: Tensor | None, out: Tensor | None
) -> Tensor:
    """Toward zero or stochastic: count the grid's steps in x, exactly, as they are powers of
    two."""
    power = _power(x, grid, layout, None)
    shift = grid.mantissa_bits << layout.mantissa_bits
    steps = x * ((2 * layout.bias << layout.mantissa_bits) + shift - power).view(x.dtype)
    whole = steps.trunc()
    if bits is not None:
        fraction = (steps - whole).abs_().mul_(2.0**31).to(torch.int32)
        up = fraction > (bits & 0x7FFFFFFF)
        whole = whole.add_(up.to(x.dtype).copysign_(steps))
    y = torch.mul(whole, power.sub_(shift).view(x.dtype), out=out)
    y = _overflow(y, x, grid, rounding)
    return y if grid.negative_zero else y.add_(0.0)


def _overflow(y: Tensor, x: Tensor, grid: Grid, rounding: str) -> Tensor:
    """The overflow policy of `round_to_grid` applied to `y`, which is `x` rounded without a limit,
    in place."""
    if grid.beyond == grid.largest:
        return y.clamp_(-grid.largest, grid.largest)
    if rounding == "toward_zero":
        y.clamp_(-grid.largest, grid.largest)
        over = x.isinf()
    else:
        over = y.abs() > grid.largest
    return y.mul_(torch.where(over, grid.beyond, 1.0))


def _round_by_bits(
    x: Tensor, grid: Grid, layout: Layout, rounding: str, bits: Tensor | None, out: Tensor | None
) -> Tensor:
    """Any rounding, on the bits of x: integers only, so float32 subnormals are numbers like any
    other.

    x is significand * 2**e; the low `drop` bits of the significand are below the grid's spacing at
    x. They are shifted out and decide, as a fraction of 31 bits, whether the rest is incremented.
    """
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
    up = _round_up(significand, drop, width, rounding, bits)
    # Below the spacing there is only the choice between 0 and one step; above it the bits of x,
    # exponent and all, count steps, and the carry into the exponent is the right one.
    step = layout.encode(2.0 ** (grid.min_exponent - grid.mantissa_bits))
    kept = drop.clamp(max=width)
    rounded = torch.where(drop > width, up * step, ((magnitude >> kept) + up) << kept)
    result = _finish_bits(raw, magnitude, rounded, grid, layout, rounding).view(x.dtype)
    return result if out is None else out.copy_(result)


def _round_up(
    significand: Tensor, drop: Tensor, width: int, rounding: str, bits: Tensor | None
) -> Tensor:
    """1 where the kept part of `significand` is to be incremented, else 0; integers like
    `significand`."""
    if rounding == "toward_zero":
        return torch.zeros_like(significand)
    # The dropped bits as a fraction of 2**places. Where that truncates, the fraction is below 2**-7
    # anyway.
    places = significand.element_size() * 8 - 1
    fraction = significand << (places - drop).clamp_(min=0)
    fraction = (fraction >> (drop - places).clamp_(min=0)) & ((1 << places) - 1)
    if rounding == "nearest":
        odd = (significand >> drop) & 1
        up = fraction > (1 << (places - 1)) - odd
    else:
        assert bits is not None
        up = (fraction >> (places - 31)) > (bits & 0x7FFFFFFF)
    return up.to(significand.dtype)


def _finish_bits(
    raw: Tensor, magnitude: Tensor, rounded: Tensor, grid: Grid, layout: Layout, rounding: str
) -> Tensor:
    """The bits of the result: overflow, NaN and sign applied to the rounded magnitude."""
    largest = layout.encode(grid.largest)
    if grid.smallest:
        rounded = rounded.clamp_(min=layout.encode(grid.smallest))
    if grid.beyond == grid.largest:
        rounded = rounded.clamp_(max=largest)
    else:
        if rounding == "toward_zero":
            rounded = torch.where(magnitude < layout.infinity, rounded.clamp(max=largest), rounded)
        rounded = torch.where(rounded > largest, layout.encode(grid.beyond), rounded)
    rounded = torch.where(magnitude > layout.infinity, magnitude, rounded)
    sign = raw ^ magnitude
    if grid.smallest:
        return torch.where((sign != 0) & (magnitude != 0), layout.encode(math.nan), rounded)
    if not grid.negative_zero:
        sign = torch.where(rounded == 0, 0, sign)
    return rounded | sign
