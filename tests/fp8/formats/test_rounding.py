"""The rounding kernels agree with each other bit by bit."""

from __future__ import annotations

import pytest

from fp8 import FORMATS, Format
from fp8.formats.rounding import LAYOUTS, Grid, _fits_floats, _round_by_bits, round_to_grid
from tests.fp8.oracles import assert_same, random_bits, random_patterns


def grid_of(format: Format, beyond: float) -> Grid:
    return Grid(
        format.mantissa_bits,
        format.min_exponent,
        format.max,
        beyond,
        format.negative_zero,
        0.0 if format.signed else format.min_subnormal,
    )


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero", "stochastic"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_float_and_integer_kernels_agree(format: Format, rounding: str) -> None:
    single = random_patterns(100_000, 1)
    double = single.double() * (1 + 2.0**-30)
    bits = random_bits((100_000,), 2)
    tested = 0
    for x in (single, double):
        for beyond in {format.max, format.nonfinite or format.max}:
            grid, layout = grid_of(format, beyond), LAYOUTS[x.dtype]
            if _fits_floats(grid, layout):
                tested += 1
                drawn = bits if rounding == "stochastic" else None
                want = _round_by_bits(x, grid, layout, rounding, drawn)
                assert_same(round_to_grid(x, grid, rounding, bits=drawn), want, x)
    assert tested or format.name == "e8m0"
