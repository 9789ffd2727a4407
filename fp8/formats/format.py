"""Floating-point formats: their bits and values, and what becomes of overflow, Inf, NaN and -0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.compiler import compiled_as
from ..common.validation import check_between, check_name, names_of

_TYPES: dict[str, type | tuple[type, ...]] = {
    "name": str,
    **dict.fromkeys(("exponent_bits", "mantissa_bits", "bias"), int),
    "max": (int, float),
    "dtype": (torch.dtype, type(None)),
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype, without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


FORMATS: dict[str, Format] = {}
"""The named formats. Each row is tested, documented and usable in recipes."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format: its values, and how values outside of it are represented.

    A code with exponent field E > 0 and mantissa field M is (1 + M / 2**mantissa_bits) * 2**(E -
    bias); with E = 0 it is (M / 2**mantissa_bits) * 2**(1 - bias): zero and the subnormals.

    Attributes:
        name: the name that `get_format` looks up and `str` prints.
        exponent_bits: 1 to 8.
        mantissa_bits: 0 to 23, without the implicit leading bit.
        bias: subtracted from the exponent field. IEEE 754 uses 2**(exponent_bits - 1) - 1.
        max: the largest finite value. The other fields do not determine it, because formats reserve
            different codes for Inf and NaN.
        infinity: whether the format has codes for +-Inf.
        nan: whether the format has a code for NaN. NaN in a tensor always stays NaN.
        negative_zero: whether -0 differs from +0; if not, -0 becomes +0.
        dtype: a torch dtype with these values, for casts of tensors, or None.

    Raises:
        ValueError: if the fields contradict each other, if a value is not a float32, for a dtype
            that lacks these values, and for the name of a row of `FORMATS` with other values (names
            identify formats in reports, files and graphs).
        TypeError: for a field of the wrong type.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    infinity: bool = False
    nan: bool = False
    negative_zero: bool = True
    dtype: torch.dtype | None = None

    text: ClassVar[str]
    """Set per instance: its fields, for `from_text`. torch.compile treats a string as a constant;
    under dynamic shapes it does not treat a number read from an object as one."""

    def __post_init__(self) -> None:
        what = f"format {self.name!r}"

        def require(condition: bool, needs: str) -> None:
            if not condition:
                raise ValueError(f"{what}: {needs}")

        for field, kind in _TYPES.items():
            value = getattr(self, field)
            if not isinstance(value, kind):
                raise TypeError(f"{what}: {field} cannot be {value!r}")
        require(bool(self.name), "the name is empty")
        # At most the bits of float32, in which formats are computed.
        check_between(f"{what}: exponent_bits", self.exponent_bits, 1, 8)
        check_between(f"{what}: mantissa_bits", self.mantissa_bits, 0, 23)
        require(0 < self.max < math.inf, f"max is {self.max}, not finite and positive")
        low = self.min_exponent
        bits = self.mantissa_bits
        high = min(2**self.exponent_bits - 1 - self.bias, 127)
        check_between(f"{what}: the exponent of min normal", low, -127, high)
        check_between(f"{what}: the exponent of max", self.max_exponent, low, high)
        steps = math.ldexp(self.max, bits - self.max_exponent)
        require(steps.is_integer(), f"max {self.max} has more than {bits} bits")
        fits = self.dtype is None or self._is_in(self.dtype)
        require(fits, f"{self.dtype} lacks its values")
        row = FORMATS.get(self.name, self)
        require(row == self, f"fp8.FORMATS has that name: {row!r}; choose another")
        _, *numbers, dtype = [getattr(self, name) for name in names_of(Format)]
        # A flag is 0 or 1.
        texts = [self.name, *(str(number + 0) for number in numbers)]
        texts.append("" if dtype is None else dtype_name(dtype))
        object.__setattr__(self, "text", "|".join(texts))

    def _is_in(self, dtype: torch.dtype) -> bool:
        """Whether a dtype has the range and precision of the format."""
        if not dtype.is_floating_point:
            return False
        limits = torch.finfo(dtype)
        step = 2.0**-self.mantissa_bits
        if limits.eps > step or limits.smallest_normal * step > self.min_subnormal:
            return False
        return limits.min <= -self.max and limits.max >= self.max

    @staticmethod
    def from_text(text: str) -> Format:
        """The format with this `text`. Not validated again."""
        name, exponent_bits, mantissa_bits, bias, largest, *flags, dtype = text.rsplit(
            "|", 8
        )
        sizes = (int(exponent_bits), int(mantissa_bits), int(bias), float(largest))
        kind = getattr(torch, dtype) if dtype else None
        values = (name, *sizes, *[flag == "1" for flag in flags], kind, text)
        format = object.__new__(Format)
        for field, value in zip(_STORED, values, strict=True):
            object.__setattr__(format, field, value)
        return format

    def __str__(self) -> str:
        return self.name

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of `max`."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_normal(self) -> float:
        """The smallest value with full precision."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value, and the distance between values below `2 * min_normal`."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def bits(self) -> int:
        """Bits in a code: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def nonfinite(self) -> float | None:
        """The result of overflow without saturation: inf, nan, or None (no code for either)."""
        if self.infinity:
            return math.inf
        return math.nan if self.nan else None


_STORED = (*names_of(Format), "text")
"""The attributes of a format, in the order of its `text`."""


for _row in (
    # OCP 8-bit Floating Point Specification (OFP8) revision 1.0, table 1. E4M3 uses all but one
    # code of its top exponent for finite values: no Inf, one NaN.
    Format(
        name="e4m3",
        exponent_bits=4,
        mantissa_bits=3,
        bias=7,
        max=448.0,
        nan=True,
        dtype=torch.float8_e4m3fn,
    ),
    Format(
        name="e5m2",
        exponent_bits=5,
        mantissa_bits=2,
        bias=15,
        max=57344.0,
        infinity=True,
        nan=True,
        dtype=torch.float8_e5m2,
    ),
    # Noune et al., "8-bit numerical formats for deep neural networks", 2022 (arXiv:2206.02915): the
    # code of -0 is the only NaN, and the bias is one larger than in IEEE 754. Used by Graphcore and
    # AMD MI300.
    Format(
        name="e4m3fnuz",
        exponent_bits=4,
        mantissa_bits=3,
        bias=8,
        max=240.0,
        nan=True,
        negative_zero=False,
        dtype=torch.float8_e4m3fnuz,
    ),
    Format(
        name="e5m2fnuz",
        exponent_bits=5,
        mantissa_bits=2,
        bias=16,
        max=57344.0,
        nan=True,
        negative_zero=False,
        dtype=torch.float8_e5m2fnuz,
    ),
    # OCP Microscaling Formats (MX) specification version 1.0, section 5.3: all codes are finite.
    Format(
        name="e3m2",
        exponent_bits=3,
        mantissa_bits=2,
        bias=3,
        max=28.0,
    ),
    Format(
        name="e2m3",
        exponent_bits=2,
        mantissa_bits=3,
        bias=1,
        max=7.5,
    ),
    Format(
        name="e2m1",
        exponent_bits=2,
        mantissa_bits=1,
        bias=1,
        max=6.0,
    ),
    # The upper half of a float32.
    Format(
        name="bf16",
        exponent_bits=8,
        mantissa_bits=7,
        bias=127,
        max=(2 - 2.0**-7) * 2.0**127,
        infinity=True,
        nan=True,
        dtype=torch.bfloat16,
    ),
    # IEEE 754-2019 binary16.
    Format(
        name="fp16",
        exponent_bits=5,
        mantissa_bits=10,
        bias=15,
        max=65504.0,
        infinity=True,
        nan=True,
        dtype=torch.float16,
    ),
):
    FORMATS[_row.name] = _row


@compiled_as(lambda format: Format.from_text(format.text))
def _of_constants(format: Format) -> Format:
    """``format``; in a graph, an equal one whose numbers are constants, see `Format.text`."""
    return format


def get_format(format: str | Format) -> Format:
    """The row of `FORMATS` with this name; a `Format` is returned unchanged. Raises ValueError for
    an unknown name, TypeError for an argument that is neither."""
    if not isinstance(format, str | Format):
        names = ", ".join(map(repr, FORMATS))
        raise TypeError(
            f"format is a {type(format).__name__}; give a name or a Format: {names}"
        )
    if isinstance(format, str):
        check_name("format", format, FORMATS)
        format = FORMATS[format]
    return _of_constants(format)
