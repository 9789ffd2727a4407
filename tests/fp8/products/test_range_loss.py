"""What a cast loses to the range of its format: against casts of known values, and beside those
that `fp8.stats` sees."""

import math

import pytest
import torch
from torch import nn

import fp8
from fp8.casts.casting import cast_values
from fp8.formats.format import get_format
from fp8.modes.autocast import LayerBlock
from fp8.products.range_loss import (
    TOLERANCE,
    ProductCasts,
    RangeLoss,
    measured_loss,
    range_loss,
    sqnr,
    without_limits,
)
from fp8.recipes.cast import Cast
from fp8.recipes.history import LayerState
from fp8.recipes.recipe import PLAIN, STATIC, Recipe
from tests.shared import normal, parametrize


@parametrize("format", "e4m3 e5m2 e3m2 e2m3".split())
@parametrize("octave", [-60, 0, 60])
def test_normal_values_lose_nothing_at_a_scale(format, octave):
    x = 2.0**octave * normal(64, 256)
    own = sqnr(x.double(), without_limits(x.double(), get_format(format)))
    assert own == pytest.approx(
        20 * math.log10(2) * get_format(format).mantissa_bits + 13.5, abs=1
    )
    found = range_loss(x, Cast(format=format, scaling="static"))
    assert math.log2(found.scale) == round(math.log2(found.scale))
    if get_format(format).exponent_bits > 3:
        assert found.is_small
        assert range_loss(x, Cast(format=format, scaling="tensor")).is_small
    assert range_loss(x, Cast(format=format)).is_small == (
        found.is_small and octave == 0
    )


@parametrize("scaling", ["static", "tensor"])
def test_a_spread_that_no_scale_holds(scaling):
    """The SQNR is that of the few large values; most values become zero."""
    x, cast = normal(64, 256), Cast(format="e4m3", scaling=scaling)
    x[:, :2] *= 2.0**20
    found = range_loss(x, cast)
    assert found.decibels < TOLERANCE
    assert found.share == pytest.approx(254 / 256, abs=0.01)
    assert not found.is_small


def test_what_is_small():
    """Up to 1.5 dB, and nine elements of ten."""
    assert RangeLoss(1.0, 1.45, 0.89).is_small
    assert not RangeLoss(1.0, 1.55, 0.0).is_small
    assert not RangeLoss(1.0, 0.0, 0.91).is_small


def test_values_that_are_not_finite():
    for value in (math.nan, math.inf, -math.inf):
        x = normal(8, 8)
        x[3, 3] = value
        found = range_loss(x, Cast(format="e4m3", scaling="tensor"))
        assert not found.is_small
        assert found.decibels == math.inf
    zeros = range_loss(torch.zeros(8, 8), Cast(format="e4m3", scaling="static"))
    assert zeros == RangeLoss(1.0, 0.0, 0.0)


@parametrize("octaves", [-20, -12, -3, 0, 3, 12, 20])
def test_a_static_scale_that_the_values_have_left(octaves):
    state = torch.tensor(2.0**octaves)
    found = range_loss(normal(64, 64), Cast(format="e4m3", scaling="static"), state)
    assert found.scale == 2.0**octaves
    assert found.is_small == (abs(octaves) < 6)


@parametrize("name", "tensor static row block mxfp8 unit".split())
def test_it_is_the_loss_of_the_cast_itself(name):
    """Of any shape and dtype, and of every kind of scale."""
    for shape in ((), (7,), (3, 5), (2, 3, 4, 40)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for cast in filter(None, (fp8.RECIPES[name].input, fp8.RECIPES[name].grad)):
                x = normal(*shape).to(dtype)
                state = torch.zeros(1) if name == "static" else None
                rows = x if x.dim() > 1 else x.reshape(1, -1)
                y, scale = cast_values(rows, cast, -1, state, False)
                factor = 1.0 if scale is None else float(scale)
                expected = measured_loss(rows, y, factor, get_format(cast.format))
                assert range_loss(x, cast) == expected


def test_the_casts_of_a_product_are_those_that_are_in_force():
    """Of the open block, with the static scales of its layer; without a block, the others."""
    x, weight = normal(4, 64), normal(64, 64)
    assert ProductCasts(STATIC, "linear", x, weight).operand(8 * x, 0, False).scale == 8
    with fp8.autocast("unit"):
        casts = ProductCasts(STATIC, "linear", x, weight)
        assert casts.operand(8 * x, 0, False).scale == casts.gradient(8 * x).scale == 1
    with fp8.autocast("unit", enabled=False):
        assert (
            ProductCasts(STATIC, "linear", x, weight).operand(8 * x, 0, False).scale
            == 8
        )
    layer = fp8.convert(nn.Linear(64, 64), "static")
    exponents = fp8.calibrate(layer, x)
    with LayerBlock(STATIC, "simulate", LayerState(layer)):
        casts = ProductCasts(PLAIN, "linear", x, layer.weight)
        losses = [casts.operand(x, 0, False), casts.operand(layer.weight, 1, True)]
        losses.append(casts.gradient(x))
        assert [math.log2(loss.scale) for loss in losses] == list(exponents.values())
        assert casts.operand(2.0**16 * x, 0, False).is_small is False


def test_each_product_of_a_layer_has_its_scales():
    """Asking does not count as a product."""
    layer = fp8.convert(nn.MultiheadAttention(16, 2, bias=False), "static")
    x = 4 * normal(3, 2, 16)
    exponents = fp8.calibrate(layer, (x, x, x), lambda output: output[0].sum())
    state = LayerState(layer)
    with LayerBlock(STATIC, "simulate", state):
        for _ in range(2):
            found = ProductCasts(PLAIN, "linear", x, layer.in_proj_weight).operand(
                x, 0, False
            )
            assert math.log2(found.scale) == exponents["001_linear_input"] == 2
        assert state.name_of("linear", x) == "001_linear_"


def test_an_operand_without_a_cast_loses_nothing():
    casts = ProductCasts(Recipe(name="none"), "linear", normal(2, 2))
    assert casts.operand(1e30 * normal(2, 2), 0, True) == RangeLoss(1.0, 0.0, 0.0)
    assert not casts.gradient(torch.full((2,), math.nan)).is_small
