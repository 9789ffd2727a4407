"""torchao's casts and layers as independent judges of the scalings and recipes."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8 import Cast
from fp8.casts.casting import cast_forward
from fp8.formats.format import get_format
from fp8.products.matmul import linear
from fp8.recipes.scaling import scale_of, scaled_tiles
from tests.reference import product

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao", reason="torchao is the oracle")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import (
        MXTensor,
        ScaleCalculationMode,
    )
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

MODES = {"up": "RCEIL", "floor": "FLOOR", "ceil": "CEIL", "even": "EVEN"}
ELEMENTS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e3m2": DTYPE_FP6_E3M2,
    "e2m3": DTYPE_FP6_E2M3,
    "e2m1": torch.float4_e2m1fn_x2,
}


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Values of every magnitude that a float32 cast under an E8M0 scale can keep, some of them
    zero, some blocks all zero, many on ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(torch.randint(-90, 90, (shape[0], 1), generator=generator))
    x[::5] = x[::5].bfloat16().float()
    x[:, ::7] = 0
    x[3] = 0
    return x


@pytest.mark.proves("the field", "MXFP8", how="library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", MODES)
@pytest.mark.parametrize("format", ELEMENTS)
def test_mx_is_bit_exact(format, rule, dtype):
    x = wide(256, 96).to(dtype)
    mode = ScaleCalculationMode[MODES[rule]]
    theirs = MXTensor.to_mx(x, ELEMENTS[format], 32, mode)
    ours = cast_forward(x, Cast(format=format, scaling="mx", rule=rule))
    assert torch.equal(ours, theirs.dequantize(dtype))
    tiles, dims = scaled_tiles(x, (1, 32), -1)
    scale = scale_of(tiles, dims, get_format(format), rule).squeeze(-1)
    used = tiles.abs().amax(-1) > 0
    assert torch.equal(scale[used], theirs.scale.float()[used])


@pytest.mark.proves("the field", "NVFP4", how="library")
def test_nvfp4_scales_are_bit_exact_and_values_up_to_ties():
    """torchao multiplies by a rounded reciprocal, where we divide: the quotients differ by at most
    three roundings, 1.5 * 2**-23, so the values differ only that close to a midpoint of e2m1."""
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    x = x * torch.exp2(torch.linspace(-6, 6, 512))[:, None]
    unit = per_tensor_amax_to_scale(x.abs().max())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=unit)
    ours = cast_forward(x, Cast(format="e2m1", scaling="nv"))
    tiles, dims = scaled_tiles(x, (1, 16), -1)
    scale = scale_of(tiles, dims, get_format("e2m1"), "e4m3").squeeze(-1)
    assert torch.equal(scale, theirs.scale.float() * unit)
    values = theirs.dequantize(torch.float32)
    differ = (ours - values).abs() > 2.0**-22 * values.abs()
    quotient = (tiles / scale[..., None]).flatten(-2)[differ].abs().double()
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    distance = (quotient[:, None] / midpoints - 1).abs().amin(-1)
    assert differ.float().mean() < 1e-4
    assert (distance <= 1.5 * 2.0**-23).all()


# --- Float8Linear

EXACT = {
    "tensor": fp8.Recipe(
        name="tensor as torchao",
        **{
            field: Cast(format=format, scaling="tensor", rule="exact")
            for field, format in (("input", "e4m3"), ("weight", "e4m3"), ("grad", "e5m2"))
        },
    ),
    "row": fp8.RECIPES["row"],
    "row_gw_hp": fp8.RECIPES["row_gw_hp"],
}
THEIRS = {"tensor": "tensorwise", "row": "rowwise", "row_gw_hp": "rowwise_with_gw_hp"}


def float8_linear(name: str, weight: Tensor, **changes: bool) -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(THEIRS[name])
    for field, value in {"emulate": True, **changes}.items():
        object.__setattr__(config, field, value)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert_to_float8_training(layer, config=config)


def three(function, x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def sqnr(got: Tensor, exact: Tensor) -> float:
    return 20 * math.log10(float(exact.norm() / (got.double() - exact).norm()))


@pytest.mark.proves("the field", "a scale for each tensor, current", how="library")
@pytest.mark.proves("the field", "a scale for each row", how="library")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tokens", [64, 48])
@pytest.mark.parametrize("name", THEIRS)
def test_float8_linear(name, tokens):
    """Where the scales are the same powers of two the operands are the same, and what is left is
    the order of summation: as tests.reference.assert_within has it, twice. Exact scales differ by
    their last bit (torchao divides in float64 and multiplies), so there SQNR is compared."""
    generator = torch.Generator().manual_seed(1)
    x, w, g = (torch.randn(s, generator=generator) for s in ((tokens, 96), (32, 96), (tokens, 32)))
    layer = float8_linear(name, w, round_scales_to_power_of_2=True)
    theirs = three(layer, x, layer.weight, g)
    recipe = fp8.RECIPES[name]
    leaf = w.clone().requires_grad_()
    ours = three(lambda x: linear(x, leaf, recipe=recipe), x, leaf, g)
    values, magnitudes = product(nn.functional.linear, (x, w), g, recipe=recipe)
    for one, other, value, magnitude in zip(ours, theirs, values, magnitudes, strict=True):
        assert ((one - other).abs() <= 2 * 100 * 2.0**-24 * magnitude).all()
        assert ((other.double() - value).abs() <= 100 * 2.0**-24 * magnitude).all()
    exact, _ = product(nn.functional.linear, (x, w), g)
    layer = float8_linear(name, w)
    theirs = three(layer, x, layer.weight, g)
    ours = three(lambda x: linear(x, leaf, recipe=EXACT[name]), x, leaf, g)
    for one, other, value in zip(ours, theirs, exact, strict=True):
        if not torch.allclose(other.double(), value, rtol=1e-4):  # high precision in gw_hp
            assert abs(sqnr(one, value) - sqnr(other, value)) < 0.1
