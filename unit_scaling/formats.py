"""`FPFormat`: floating-point formats given by their numbers of bits.

These are "fnuz" formats, but with -0 and without a NaN code: the bias is ``2**(exponent_bits - 1)``
and every code is a finite value. For hardware formats (OCP E4M3 and E5M2 among them) see
`fp8.FORMATS`.

Source: Noune et al. 2022, arXiv 2206.02915.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fp8.common.validation import check_between, check_name
from fp8.formats.format import Format
from fp8.formats.quantize import quantize, quantize_backward, quantize_forward

__all__ = ["FPFormat", "format_to_tuple", "tuple_to_format"]

_SHORT = {"nearest": "RN", "stochastic": "SR"}

# The mantissa bits of float32; stochastic rounding adds random bits in place of the dropped ones.
_MANTISSA_BITS = 23


@dataclass
class FPFormat:
    """A format of 1 + exponent_bits + mantissa_bits bits, and its rounding mode.

    Values beyond the largest saturate, including Inf; NaN and -0 stay.

    Args:
        exponent_bits: 1 to 8.
        mantissa_bits: 0 to 23.
        rounding: "stochastic" or "nearest" (ties to even).
        srbits: the number of random bits of stochastic rounding; 0 means all dropped bits.

    >>> FPFormat(4, 3).max_absolute_value
    240.0
    """

    exponent_bits: int
    mantissa_bits: int
    rounding: str = "stochastic"
    srbits: int = 0

    def __post_init__(self) -> None:
        check_name("rounding", self.rounding, _SHORT)
        check_between("exponent_bits", self.exponent_bits, 1, 8)
        check_between("mantissa_bits", self.mantissa_bits, 0, _MANTISSA_BITS)
        dropped = (
            _MANTISSA_BITS - self.mantissa_bits if self.rounding == "stochastic" else 0
        )
        check_between(f"srbits of {self.rounding} rounding", self.srbits, 0, dropped)
        self.srbits = self.srbits or dropped

    @property
    def format(self) -> Format:
        """The format for functions of `fp8`."""
        # One more than in IEEE 754, as in unit-scaling 0.3.5 (arXiv 2206.02915).
        bias = 2 ** (self.exponent_bits - 1)
        return Format(
            name=f"E{self.exponent_bits}M{self.mantissa_bits}",
            exponent_bits=self.exponent_bits,
            mantissa_bits=self.mantissa_bits,
            bias=bias,
            max=(2 - 2.0**-self.mantissa_bits) * 2.0 ** (bias - 1),
        )

    @property
    def random_bits(self) -> int:
        """``srbits`` as the random_bits of `fp8.quantize`, where 31 stands for all."""
        dropped = _MANTISSA_BITS - self.mantissa_bits
        if 0 < self.srbits < dropped:
            return self.srbits
        return 31

    @property
    def bits(self) -> int:
        """The number of sign, exponent and mantissa bits."""
        return self.format.bits

    @property
    def max_absolute_value(self) -> float:
        """The largest value; larger values saturate to it."""
        return self.format.max

    @property
    def min_absolute_normal(self) -> float:
        """The smallest normal value."""
        return self.format.min_normal

    @property
    def min_absolute_subnormal(self) -> float:
        """The smallest positive value."""
        return self.format.min_subnormal

    def _rounded(self, quantize: Callable[..., Tensor], x: Tensor) -> Tensor:
        return quantize(
            x, self.format, rounding=self.rounding, random_bits=self.random_bits
        )

    def quantise(self, x: Tensor) -> Tensor:
        """Returns ``x`` rounded to the format, in its shape and dtype, without a gradient."""
        return self._rounded(quantize, x)

    def quantise_fwd(self, x: Tensor) -> Tensor:
        """Returns ``quantise(x)``; the gradient is propagated unchanged."""
        return self._rounded(quantize_forward, x)

    def quantise_bwd(self, x: Tensor) -> Tensor:
        """Returns ``x``; its gradient is rounded in the backward pass."""
        return self._rounded(quantize_backward, x)

    def __str__(self) -> str:
        return f"{self.format.name}-{_SHORT[self.rounding]}"


def format_to_tuple(format: FPFormat) -> tuple[int, int]:
    """Returns (exponent_bits, mantissa_bits); rounding and srbits are lost."""
    return (format.exponent_bits, format.mantissa_bits)


def tuple_to_format(t: tuple[int, int]) -> FPFormat:
    """Returns the format of (exponent_bits, mantissa_bits), with stochastic rounding."""
    return FPFormat(*t)
