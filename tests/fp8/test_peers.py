"""Casts by blocks, and layers, against torchao."""

import math

import pytest
import torch
from torch import nn

from fp8 import RECIPES, Cast
from fp8.casts.casting import cast_forward
from fp8.formats.format import get_format
from fp8.products.matmul import linear
from fp8.recipes.rules import E8M0
from fp8.recipes.scaling import scale_of, scaled_tiles
from tests import reference
from tests.fp8.compare import outcome
from tests.shared import (
    assert_close,
    assert_same,
    normal,
    pairs,
    parametrize,
    proves,
    quietly,
    seeded,
    theirs,
)

with quietly():
    pytest.importorskip("torchao", reason="torchao is the oracle")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode


MODES = {"up": "RCEIL", "floor": "FLOOR", "ceil": "CEIL", "even": "EVEN"}
ELEMENTS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e3m2": DTYPE_FP6_E3M2,
    "e2m3": DTYPE_FP6_E2M3,
    "e2m1": torch.float4_e2m1fn_x2,
}
EQUAL = {"rtol": 0, "atol": 0, "equal_nan": True}

each_format = parametrize("format", ELEMENTS)


def blocks():
    """One row for each power of two of float32, its subnormals included; blocks of zeros; values on
    ties; NaN."""
    generator = seeded(0)
    x = torch.rand(276, 96, generator=generator) * 2 - 1
    x[::5] = x[::5].bfloat16().float()
    x[:, 7], x[:, ::9], x[:, 64:] = (
        1.0,
        0.0,
        x[:, 64:] * (torch.arange(276) % 3 > 0)[:, None],
    )
    return (x.double() * 2.0 ** torch.arange(-149, 127)[:, None]).float()


@proves("the field", "MXFP8", how="library")
@parametrize("dtype", [torch.float32, torch.bfloat16])
@parametrize("rule", MODES)
@each_format
def test_mx_is_torchao_s_at_every_magnitude_and_for_nan(format, rule, dtype):
    """Values are equal where its scale is not 2**-127, which torchao 0.18 stores but does not
    divide by. Inf is a large number to it, which all rules but "up" lose. Its main does as we."""
    x = blocks().to(dtype)
    x[50, 3] = x[200, 40] = math.nan
    theirs = MXTensor.to_mx(x, ELEMENTS[format], 32, ScaleCalculationMode[MODES[rule]])
    stored, values = theirs.scale.float(), theirs.dequantize(dtype)
    tiles, dims = scaled_tiles(x, (1, 32), -1)
    scale = scale_of(tiles, dims, get_format(format), rule + E8M0).squeeze(-1)
    used = tiles.abs().amax(-1) != 0
    assert_close(scale[used], stored[used], **EQUAL)
    got = cast_forward(x, Cast(format=format, scaling="mx", rule=rule))
    assert_same(got.isnan(), values.isnan())
    same = (stored != 2.0**-127).repeat_interleave(32, -1)
    assert_close(got[same], values[same], **EQUAL)


# --- Float8Linear

THEIRS = {"tensor": "tensorwise", "row": "rowwise", "row_gw_hp": "rowwise_with_gw_hp"}


def float8_linear(name, weight):
    config = Float8LinearConfig.from_recipe_name(THEIRS[name])
    for field in ("emulate", "round_scales_to_power_of_2"):
        object.__setattr__(config, field, True)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    with quietly():
        return convert_to_float8_training(layer, config=config)


@proves(
    "the field",
    "a scale for each tensor, current",
    "a scale for each row",
    how="library",
)
@theirs
@parametrize("name", THEIRS)
def test_float8_linear(name):
    """Scales are the same powers of two, so the operands are the same, and what is left is the
    order of summation: as tests.reference.assert_within has it, twice."""
    x, w, g = (normal(*s, seed=i) for i, s in enumerate(((48, 96), (32, 96), (48, 32))))
    x.requires_grad_()
    w.requires_grad_()
    layer = float8_linear(name, w)
    ours = outcome(lambda: linear(x, w, recipe=RECIPES[name]), (x, w), g)
    theirs = outcome(lambda: layer(x), (x, layer.weight), g)
    expected = reference.product(nn.functional.linear, (x, w), g, recipe=RECIPES[name])
    for one, other, value, magnitude in pairs(ours, theirs, *expected):
        assert ((one - other).abs() <= 2 * 100 * 2.0**-24 * magnitude).all()
        assert ((other.double() - value).abs() <= 100 * 2.0**-24 * magnitude).all()
