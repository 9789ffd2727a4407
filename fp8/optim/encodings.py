"""How an optimizer stores a tensor: `ENCODINGS`, and the conversions between them and float32.

A scale factor is a power of two. The rounding never makes a later step of Adam too long:

- Below the smallest normal value of the format a first moment is rounded toward zero and a second
  moment away from zero. So the former decays to zero, and the latter, a divisor, is zero only if it
  was zero before.
- Otherwise rounding is to nearest if the decay of one step exceeds half a unit in the last place
  (1 - beta > 2**-(mantissa bits + 1)). If it does not, a moment would not change, so rounding is
  stochastic, which is unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.format import FORMATS, Format
from ..formats.rounding import LAYOUTS, Grid, round_to_grid
from ..recipes.scaling import scale_of, scaled_tiles

# Consecutive elements that share the scale of a block, as in DeepSeek-V3 (arXiv:2412.19437).
BLOCK = 128

# The factor by which a master weight may grow in one step, whose scale is set before it.
HEADROOM = 2.0**7


@dataclass(frozen=True)
class Encoding:
    """A row of ENCODINGS: values of ``format`` in ``dtype``. scale: "none", "tensor" or "block"
    (`BLOCK` elements in row-major order)."""

    dtype: torch.dtype
    format: Format
    scale: str = "none"

    def rounds_stochastically(self, beta: float) -> bool:
        """Whether a moment that decays by ``beta`` would not change if rounded to nearest."""
        coarse = self.dtype != torch.float32
        return coarse and 1 - beta <= 2.0 ** -(self.format.mantissa_bits + 1)


# Not in FORMATS: nothing is cast to them.
_FLOAT32 = Format(
    name="float32",
    exponent_bits=8,
    mantissa_bits=23,
    bias=127,
    max=torch.finfo(torch.float32).max,
)
_E5M3 = Format(name="e5m3", exponent_bits=5, mantissa_bits=3, bias=16, max=61440.0)
_SHIFT = 23 - _E5M3.mantissa_bits
# The difference between the upper bits of a float32 and the code of the equal e5m3 number.
_CODE = (127 - _E5M3.bias) << _E5M3.mantissa_bits

_bits = LAYOUTS[torch.float32].encode

ENCODINGS: dict[str, Encoding] = {
    "float32": Encoding(torch.float32, _FLOAT32),
    "bfloat16": Encoding(torch.bfloat16, FORMATS["bf16"]),
    # As in FP8-LM (arXiv:2310.18313, section 2.2): first moments in e4m3, second ones in fp16.
    "float16": Encoding(torch.float16, FORMATS["fp16"], "tensor"),
    "e4m3": Encoding(torch.float8_e4m3fn, FORMATS["e4m3"], "tensor"),
    "e4m3_block": Encoding(torch.float8_e4m3fn, FORMATS["e4m3"], "block"),
    # Nonnegative: all eight bits are exponent and mantissa; zero and normal numbers only.
    "e5m3_block": Encoding(torch.uint8, _E5M3, "block"),
}
"""Name -> encoding."""

MOMENTS = {
    "first_moment": ("float32", "bfloat16", "float16", "e4m3", "e4m3_block"),
    "second_moment": ("float32", "bfloat16", "float16", "e5m3_block"),
}
"""Argument of the optimizers -> its allowed names in ENCODINGS."""

MASTERS = ("float32", "float16")
"""The names in ENCODINGS allowed for ``master_weights``."""

WEIGHTS = {
    torch.float32: ENCODINGS["float32"],
    torch.bfloat16: ENCODINGS["bfloat16"],
    torch.float16: Encoding(torch.float16, FORMATS["fp16"]),
}
"""The encodings of weights without a master, by dtype."""

WIDE = {
    dtype: Encoding(dtype, _FLOAT32)
    for dtype in (torch.float64, torch.complex64, torch.complex128)
}
"""The encodings of the moments of parameters that torch's own function steps, by their dtype."""


class Encoded(NamedTuple):
    """An encoded tensor. values: (n,). scale: None, or float32 0-dim or (blocks,). amax: 0-dim
    float32, an upper bound of all magnitudes, if there is one scale for the whole tensor."""

    values: Tensor
    scale: Tensor | None = None
    amax: Tensor | None = None

    @property
    def kind(self) -> str:
        """The kind of its scale, as `Encoding.scale`."""
        if self.scale is None:
            return "none"
        if self.scale.dim():
            return "block"
        return "tensor"

    def part(
        self,
        start: int,
        stop: int,
    ) -> Encoded:
        """Views of the elements from ``start``, a multiple of `BLOCK`, to ``stop``."""
        scale = self.scale
        if scale is not None and scale.dim():
            scale = scale[start // BLOCK : -(-stop // BLOCK)]
        return Encoded(self.values[start:stop], scale, self.amax)

    def copied(self, device: torch.device) -> Encoded:
        """A copy on a device."""
        parts = (x if x is None else x.to(device, copy=True) for x in self)
        return Encoded(*parts)  # type: ignore[arg-type]


def zeros(
    count: int,
    encoding: Encoding,
    device: torch.device,
) -> Encoded:
    """An encoded tensor of ``count`` zeros."""
    values = torch.zeros(count, dtype=encoding.dtype, device=device)
    if encoding.scale == "none":
        return Encoded(values)
    if encoding.scale == "block":
        return Encoded(values, torch.ones(-(-count // BLOCK), device=device))
    return Encoded(
        values, torch.ones((), device=device), torch.zeros((), device=device)
    )


def decode(stored: Encoded) -> Tensor:
    """The values as float32, (n,)."""
    values, scale, _ = stored
    if values.dtype == torch.uint8:
        code = values.to(torch.int32)
        x = torch.where(code > 0, ((code + _CODE) << _SHIFT).view(torch.float32), 0.0)
    else:
        x = values.to(torch.float32)
    if scale is None:
        return x
    if not scale.dim():
        return x * scale
    return (_blocks(x) * scale[:, None]).flatten()[: len(x)]


def write(
    x: Tensor,
    to: Encoded,
    encoding: Encoding,
    unit: Tensor | float | None,
    *,
    away: bool = False,
    bits: Tensor | None = None,
) -> None:
    """Encodes ``x``, float32 (n,), into ``to`` in place. Values beyond the largest value saturate.

    unit: 1 / scale of the whole tensor, which the caller stores. away: below the smallest normal
    value, round away from zero. bits: int32 (n,) random bits; None rounds to nearest."""
    y = x
    if encoding.scale == "block":
        assert to.scale is not None
        tiles = _blocks(x)
        scales = scale_of(tiles, (-1,), encoding.format, "up")
        y = (tiles * scales.reciprocal()).flatten()[: len(x)]
        to.scale.copy_(scales.flatten())
    elif encoding.scale == "tensor":
        assert unit is not None
        y = x * unit
    if encoding.dtype == torch.uint8:
        to.values.copy_(_to_e5m3(y, bits))
    else:
        to.values.copy_(_rounded(y, encoding, away, bits))


def _to_e5m3(y: Tensor, bits: Tensor | None) -> Tensor:
    """e5m3 codes, int32, of finite nonnegative ``y``; the smallest normal number for smaller."""
    word = y.view(torch.int32)
    # Half a unit in the last place, less one where the last bit is 0: ties go to even.
    add = (1 << (_SHIFT - 1)) - 1 + ((word >> _SHIFT) & 1)
    if bits is not None:
        add = (bits & 0x7FFFFFFF) >> (31 - _SHIFT)
    code = ((word + add) >> _SHIFT) - _CODE
    return torch.where(word > 0, code.clamp(1 << _E5M3.mantissa_bits, 0xFF), 0)


def _blocks(x: Tensor) -> Tensor:
    """(blocks, BLOCK), the last block padded with zeros."""
    tiles, _ = scaled_tiles(x[None], (1, BLOCK), -1)
    return tiles.flatten(0, 1)


def _rounded(
    y: Tensor,
    encoding: Encoding,
    away: bool,
    bits: Tensor | None,
) -> Tensor:
    """``y``, divided by its scale, rounded where torch's cast, to nearest even, does not do."""
    format = encoding.format
    if encoding.dtype == torch.float32:
        return y
    rounded = y
    if bits is not None:
        top = format.max
        grid = Grid(format.mantissa_bits, format.min_exponent, top, top, True)
        rounded = round_to_grid(y, grid, bits)
    if encoding.scale == "none":  # as many exponents as float32, or a weight
        return rounded
    step = format.min_subnormal
    steps = y * (1 / step)
    if away:
        # Nonnegative floats are in the order of their bits, and comparing these is faster.
        bits = rounded.view(torch.int32).clamp(max=_bits(format.max))
        rounded = bits.view(torch.float32)
        return torch.where(y < format.min_normal, steps.ceil() * step, rounded)
    # By torch's version, a cast to float8 beyond the largest value gives that, NaN or Inf.
    rounded = rounded.clamp(-format.max, format.max)
    return torch.where(y.abs() < format.min_normal, steps.trunc() * step, rounded)
