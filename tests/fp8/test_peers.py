"""Casts by blocks against the published rules of microxcaling, torchao and TransformerEngine."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8 import RECIPES, Cast
from fp8.casts.casting import cast_forward
from fp8.formats.format import get_format
from fp8.recipes.rules import E8M0
from fp8.recipes.scaling import scale_of, scaled_tiles
from tests import reference

FORMATS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def microxcaling(x: Tensor, format: str) -> Tensor:
    """Microsoft's emulation (`_quantize_mx`, scales of 8 bits, blocks of 32), in float64.

    The shared exponent is that of the largest magnitude less the format's; NaN above 127 (so for
    Inf too), -127 below that. Elements are rounded to even and saturate.
    """
    spec = get_format(format)
    blocks = x.double().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    shared = torch.where(largest == 0, 2.0**-126, largest).log2().floor() - spec.max_exponent
    shared = torch.where(shared > 127, math.nan, shared).clamp(min=-127)
    scale = 2.0**shared
    return (reference.rounded(blocks / scale, spec) * scale).flatten(-2)


def blocks(seed: int = 0) -> Tensor:
    """One row for each power of two of float32, its subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(276, 64, generator=generator) * 2 - 1
    x[:, 7] = 1.0
    return (x.double() * 2.0 ** torch.arange(-149, 127)[:, None]).float()


@pytest.mark.parametrize("format", FORMATS)
def test_mx_is_microxcaling_s_at_every_magnitude(format):
    x = blocks()
    got = cast_forward(x, Cast(format=format, scaling="mx", rule="floor"))
    assert torch.equal(got, microxcaling(x, format).float())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("format", FORMATS)
def test_mx_is_microxcaling_s_beside_inf_and_nan(format, bad):
    """All of such a block is NaN, the one beside it as if nothing were."""
    x = blocks()[100:150]
    x[::2, 3] = bad
    got = cast_forward(x, Cast(format=format, scaling="mx", rule="floor"))
    torch.testing.assert_close(got, microxcaling(x, format).float(), rtol=0, atol=0, equal_nan=True)
    assert got[::2, :32].isnan().all()
    assert got[1::2].isfinite().all()
    assert got[:, 32:].isfinite().all()


@pytest.mark.parametrize("rule", ["floor", "up", "ceil", "even"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e2m1"])
def test_mx_scales_are_torchao_s_at_every_magnitude_and_for_nan(format, rule):
    """And the values where its scale is not 2**-127, which it stores and does not divide by; Inf it
    takes for a large number, and so loses it by all rules but "up"."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from tests.fp8.test_torchao import ELEMENTS, MODES, ScaleCalculationMode

    x = blocks()
    x[50, 3] = x[200, 40] = math.nan
    mode = ScaleCalculationMode[MODES[rule]]
    theirs = mx.MXTensor.to_mx(x, ELEMENTS[format], 32, mode)
    tiles, dims = scaled_tiles(x, (1, 32), -1)
    scale = scale_of(tiles, dims, get_format(format), rule + E8M0).squeeze(-1)
    stored = theirs.scale.float()
    torch.testing.assert_close(scale, stored, rtol=0, atol=0, equal_nan=True)
    got = cast_forward(x, Cast(format=format, scaling="mx", rule=rule))
    same = (stored != 2.0**-127).repeat_interleave(32, -1)
    values = theirs.dequantize(torch.float32)
    assert torch.equal(got.isnan(), values.isnan())
    torch.testing.assert_close(got[same], values[same], rtol=0, atol=0, equal_nan=True)


def transformer_engine(x: Tensor) -> Tensor:
    """NVFP4 as the reference of TransformerEngine's own tests has it: e4m3 scales of 16 values,
    subnormal ones too, in units of one float32."""
    unit = torch.tensor(448.0 * 6.0) / x.abs().max()
    tiles = x.unflatten(-1, (-1, 16))
    decode = (tiles.abs().amax(-1, keepdim=True) / 6.0 * unit).clamp(max=448.0)
    decode = decode.to(torch.float8_e4m3fn).float()
    encode = (1 / (decode * (1 / unit))).clamp(max=torch.finfo(torch.float32).max)
    units = (tiles * encode).clamp(-6.0, 6.0)
    values = reference.rounded(units, get_format("e2m1")).float()
    return (values * decode / unit).flatten(-2)


def decibel(x: Tensor, y: Tensor) -> float:
    return 10 * math.log10(x.double().square().sum() / (x.double() - y).square().sum())


def test_nvfp4_keeps_subnormal_scales_as_transformer_engine_does():
    """Blocks of some 2**-17 of the largest magnitude have scales among e4m3's subnormals."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 2.0**18
    got, theirs = cast_forward(x, RECIPES["nvfp4"].input), transformer_engine(x)
    rest = slice(1, None)
    ours_db, theirs_db = decibel(x[rest], got[rest]), decibel(x[rest], theirs[rest])
    assert ours_db == pytest.approx(theirs_db, abs=0.05)
    differ = (got - theirs).abs() > 1e-6 * got.abs()
    assert differ.float().mean() < 1e-3  # next to midpoints: quotients there are rounded thrice
    floor = 2.0**-6 * x.abs().max() / (448 * 6)  # of torchao's scales
    tiles = x.unflatten(-1, (-1, 16))
    scale = (tiles.abs().amax(-1, keepdim=True) / 6).clamp(min=floor)
    clamped = (reference.rounded(tiles / scale, get_format("e2m1")) * scale).flatten(-2)
    assert decibel(x[rest], clamped[rest]) < ours_db - 3


def test_nvfp4_blocks_below_every_scale_keep_something():
    """Where TransformerEngine's scale is rounded to zero, ours is the smallest, 2**-9."""
    x = torch.full((2, 16), 1.0)
    x[0, 0] = 448 * 6 * 2.0**8  # so the other block's amax / 6 is 2**-11 units or so
    assert (transformer_engine(x)[1] == 0).all()
    assert torch.allclose(cast_forward(x, RECIPES["nvfp4"].input)[1], x[1], rtol=0.5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nvfp4_loses_the_block_of_inf_or_nan_and_no_other(bad):
    """As torchao's scales are for NaN, under the same scale of the tensor; Inf it makes finite."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    clean = cast_forward(torch.where(torch.arange(64) < 16, 0.0, x), RECIPES["nvfp4"].input)
    x[:, 3] = bad
    got = cast_forward(x, RECIPES["nvfp4"].input)
    assert got[:, :16].isnan().all()
    assert torch.equal(got[:, 16:], clean[:, 16:])
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    unit = nv.per_tensor_amax_to_scale(x[:, 16:].abs().max())
    theirs = nv.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=unit).dequantize(torch.float32)
    assert theirs[:, :16].isnan().all() == math.isnan(bad)
    assert theirs[:, 16:].isfinite().all()
