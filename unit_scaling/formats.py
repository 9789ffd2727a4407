"""`FPFormat`: formats by their numbers of bits, in the symmetric family with one bias.

For the formats of hardware (OCP e4m3 and e5m2 among them) see `fp8.FORMATS`. Those of `FPFormat`
are the "fnuz" family (Noune et al. 2022, arXiv 2206.02915), with -0 and without a NaN code of
their own: the bias is ``2**(exponent_bits - 1)`` and every code is a finite value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fp8.common.validation import check_name
from fp8.formats.format import Format
from fp8.formats.quantize import quantize, quantize_backward, quantize_forward

__all__ = ["FPFormat", "format_to_tuple", "tuple_to_format"]

_SHORT = {"nearest": "RN", "stochastic": "SR"}

# float32 has this many mantissa bits; stochastic rounding draws random ones for those dropped.
_MANTISSA_BITS = 23


@dataclass
class FPFormat:
    """A format of 1 + exponent_bits + mantissa_bits bits, and how values are rounded to it.

    exponent_bits: 1 to 8. mantissa_bits: 0 to 23. rounding: "stochastic" or "nearest" (ties to
    even). srbits: how many random bits stochastic rounding uses; 0 means all there are to drop.
    Values beyond the largest saturate, Inf included; NaN stays NaN, -0 stays -0.
    Raises ValueError for anything else.

    >>> FPFormat(4, 3).max_absolute_value
    240.0
    """

    exponent_bits: int
    mantissa_bits: int
    rounding: str = "stochastic"
    srbits: int = 0

    def __post_init__(self) -> None:
        check_name("rounding", self.rounding, _SHORT)
        for name, lowest, most in (
            ("exponent_bits", 1, 8),
            ("mantissa_bits", 0, _MANTISSA_BITS),
            ("srbits", 0, None),
        ):
            got = getattr(self, name)
            if isinstance(got, bool) or not isinstance(got, int):
                raise TypeError(f"{name} must be a whole number from {lowest}, got {got!r}")
            if most is not None and not lowest <= got <= most:
                raise ValueError(f"{name} is {got}, allowed are {lowest} to {most}")
        _ = self.format  # refuses impossible numbers of bits
        dropped = _MANTISSA_BITS - self.mantissa_bits
        if self.srbits and self.rounding == "nearest":
            raise ValueError(f"srbits is for stochastic rounding: got {self.srbits} with 'nearest'")
        if not 0 <= self.srbits <= dropped:
            raise ValueError(f"srbits must be 0 to {dropped} here: got {self.srbits}")
        if self.rounding == "stochastic" and self.srbits == 0:
            self.srbits = dropped

    @property
    def format(self) -> Format:
        """The set of values, for `fp8`."""
        bias = 2 ** (self.exponent_bits - 1) if self.exponent_bits > 0 else 0
        return Format(
            name=f"E{self.exponent_bits}M{self.mantissa_bits}",
            exponent_bits=self.exponent_bits,
            mantissa_bits=self.mantissa_bits,
            bias=bias,
            max=(2 - 2.0**-self.mantissa_bits) * 2.0 ** (bias - 1),
        )

    @property
    def random_bits(self) -> int:
        """What ``srbits`` is to `fp8.quantize`, where "all" are 31, more than are ever dropped."""
        dropped = _MANTISSA_BITS - self.mantissa_bits
        return self.srbits if 0 < self.srbits < dropped else 31

    @property
    def bits(self) -> int:
        """Sign, exponent and mantissa bits."""
        return self.format.bits

    @property
    def max_absolute_value(self) -> float:
        """The largest value: what lies beyond saturates to it."""
        return self.format.max

    @property
    def min_absolute_normal(self) -> float:
        """The smallest value with full precision."""
        return self.format.min_normal

    @property
    def min_absolute_subnormal(self) -> float:
        """The smallest value above zero."""
        return self.format.min_subnormal

    def quantise(self, x: Tensor) -> Tensor:
        """x rounded to values of the format. Shape and floating-point dtype of x; no gradient."""
        return quantize(x, self.format, rounding=self.rounding)

    def quantise_fwd(self, x: Tensor) -> Tensor:
        """`quantise(x)`, with the gradient passed back unchanged."""
        return quantize_forward(x, self.format, rounding=self.rounding)

    def quantise_bwd(self, x: Tensor) -> Tensor:
        """x itself, with its gradient rounded on the way back."""
        return quantize_backward(x, self.format, rounding=self.rounding)

    def __str__(self) -> str:
        return f"{self.format.name}-{_SHORT[self.rounding]}"


def format_to_tuple(format: FPFormat) -> tuple[int, int]:
    """(exponent_bits, mantissa_bits): all that a tuple keeps; rounding and srbits are lost."""
    return (format.exponent_bits, format.mantissa_bits)


def tuple_to_format(t: tuple[int, int]) -> FPFormat:
    """The format of (exponent_bits, mantissa_bits), with stochastic rounding."""
    return FPFormat(*t)
