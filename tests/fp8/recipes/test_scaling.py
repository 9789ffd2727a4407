import math

import pytest
import torch

from fp8 import FORMATS, Cast, quantize
from fp8.casts.casting import cast_forward
from fp8.casts.rotation import rotated
from fp8.recipes.rules import RULES
from fp8.recipes.scaling import SCALINGS, scale_of
from tests import reference
from tests.shared import assert_close, assert_same, normal, parametrize, proves, sampled

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NOW = {name: row for name, row in SCALINGS.items() if row.rules and name != "delayed"}
SCALED = [(name, rule) for name, row in NOW.items() for rule in row.rules]
E4M3 = FORMATS["e4m3"]


# --- rules


@sampled(7)
@parametrize("format", FORMATS.values())
@parametrize("dtype", DTYPES)
@parametrize("rule", RULES)
def test_a_rule_is_its_definition(rule, format, dtype):
    if RULES[rule].unit and format.max > 1e9:
        pytest.skip("448 times its largest value is no float32")
    limits = torch.finfo(dtype)
    real = reference.np.float64 if dtype == torch.float64 else reference.np.float32
    values = 1.0, 0.3, 6.0, 448.0, 449.0, 57344.0, 60000.0
    for amax in (*values, limits.max, limits.tiny):
        for factor in (1.0, 1 + limits.eps, 1 - limits.eps / 2):
            x = torch.tensor([0.0, -amax * factor, amax / 3], dtype=torch.float64).to(
                dtype
            )
            if x.isfinite().all():
                whole = x.double().abs().max().item()
                scale = scale_of(x, None, format, rule)
                wanted = reference.scale_by_error(x, format, rule, whole, real)
                assert scale.item() == wanted, (amax, factor)


@parametrize("dtype", [torch.float32, torch.float64])
@parametrize("rule, top", [("e4m3_up", 448), ("e4m3_4_6_up", 256)])
def test_a_scale_that_is_a_code_is_not_rounded_up(rule, top, dtype):
    """Whatever the errors of the divisions: of the tile with the largest magnitude, of 1.5 times
    it, and of tiles whose magnitudes are simple fractions of it."""
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    whole, format = normal(1000, 1).abs().to(dtype) + 0.1, FORMATS["e2m1"]
    for largest in whole:
        unit = RULES[rule].unit_of(largest, format)
        scale = RULES[rule].scale_of(largest * (codes / top), format, unit)
        assert_same(scale, codes * unit)


@parametrize("rule", RULES)
def test_the_range_of_a_scale(rule):
    for value in (2.0**-149, 1e-44, 1e-14, 3.4e38):
        scale = scale_of(torch.tensor([value]), None, E4M3, rule)
        assert 2.0**-126 <= scale <= 2.0**126
    beyond = torch.tensor([1e300], dtype=torch.float64)
    assert scale_of(beyond, None, E4M3, "up") == 2.0**126


# --- tiles


TILES = [(name, row.tile) for name, row in NOW.items()]
TILES += [("block", (4, 16)), ("block", (4, 1)), ("mx", (2, 8)), ("nv", (16, 16))]
SHAPES = [(1, 1), (17, 33), (4, 130), (130, 3), (2, 1, 5, 20)]


@proves("the field", "blocks of 128 and of 128 x 128")
@parametrize("axis", [-1, -2])
@parametrize("shape", SHAPES)
@parametrize("scaling, tile", TILES)
def test_a_cast_is_the_reference_s_tile_by_tile(scaling, tile, shape, axis):
    """Bit for bit, with sizes that the tile does not divide."""
    x = normal(*shape) * torch.exp2(normal(*shape[:-1], 1, seed=1) * 8)
    cast = Cast(
        format="e4m3" if scaling != "nv" else "e2m1", scaling=scaling, tile=tile
    )
    got = cast_forward(x, cast, axis)
    assert got.shape == x.shape
    wanted = reference.cast(x, cast, axis)
    assert_same(got, wanted.float())


def test_toward_zero_is_that_of_quantize():
    x, cast = normal(9, 40), Cast(format="e4m3", scaling="row", rounding="toward_zero")
    scale = scale_of(x, (1,), E4M3, cast.rule)
    wanted = quantize(x, "e4m3", scale=scale, rounding="toward_zero")
    assert_same(cast_forward(x, cast), wanted)


@parametrize("scaling, rule", SCALED)
def test_zero_inf_nan_tiny_and_huge(scaling, rule):
    """What the docstring of scale_of says of each: in one row, with a row of ordinary numbers."""
    cast = Cast(format="e5m2", scaling=scaling, rule=rule)

    def first(*values):
        x = torch.zeros(2, 32)
        x[0, : len(values)], x[1] = torch.tensor(values), 1
        y = cast_forward(x, cast)
        alone = scaling != "tensor" and not RULES[rule].unit
        assert not alone or torch.equal(y[1], torch.ones(32))
        return y[0, : len(values)].tolist()

    assert first(0.0, -0.0) == [0.0, 0.0]
    if scaling == "mx" or RULES[rule].unit:
        assert all(map(math.isnan, first(math.inf, 1.0) + first(math.nan, 1.0)))
    else:
        assert first(math.inf, 1.0) == [math.inf, 1.0]
        assert first(-math.inf, 1.0) == [-math.inf, 1.0]
        assert math.isnan(first(math.nan, 1.0)[0])
        assert first(math.nan, 1.0)[1] == 1.0
    assert first(3e38)[0] == pytest.approx(3e38, rel=0.25)
    assert cast_forward(torch.zeros(0, 5), cast).shape == (0, 5)
    assert cast_forward(torch.zeros(5, 0), cast).shape == (5, 0)


# --- rotation


@parametrize("size", [2, 128])
def test_a_rotation_is_orthogonal_and_sylvester_s(size):
    matrix = rotated(torch.eye(size, dtype=torch.float64), size, -2)
    assert_close(matrix, reference.rotation(size))
    assert_close(matrix @ matrix.mT, torch.eye(size, dtype=torch.float64))
    x = normal(3, size + 1).double()
    assert rotated(x, size, -1).shape == (3, 2 * size)
    assert_close(rotated(x, size, -1), rotated(x.mT, size, -2).mT)
