"""Rows of `fp8.RECIPES` against numbers and identities of their papers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fp8
from fp8.casts.casting import cast_forward, rotated, rounded, spec_of, turn_of
from fp8.casts.casting import codes as quantized
from fp8.products.matmul import linear
from fp8.recipes.rules import CLIP
from fp8.recipes.scaling import scale_of
from fp8.sums.dot import dot
from fp8.sums.tensor_cores import TENSOR_CORES, Matrix
from tests.reference import rotation

E4M3_LOW = -6


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def e4m3(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Codes of tiles of (rows, 128), and their scales: the largest magnitude / 448."""
    tiles = x.unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    codes = (tiles / scale).to(torch.float8_e4m3fn).float()
    scale = scale.squeeze(3).expand(-1, rows, -1).flatten(0, 1)
    return codes.flatten(2).flatten(0, 1), scale


def test_deepseek_v3_adds_every_128_products_in_float32():
    """Section 3.3.2: the tensor core sums 128 products, then the scales of both tiles multiply the
    sum, which is added in float32."""
    x, w = randn(5, 512), randn(256, 512, seed=1)
    (a, of_a), (b, of_b) = e4m3(x, 1), e4m3(w, 128)
    hopper = TENSOR_CORES["hopper"][0]
    total = torch.zeros(5, 256, dtype=torch.float64)
    for i, at in enumerate(range(0, 512, 128)):
        operands = (Matrix(t[:, at : at + 128], E4M3_LOW) for t in (a, b))
        total += dot(*operands, hopper).double() * (of_a[:, i, None] * of_b[None, :, i]).double()
    got = linear(x, w, recipe=fp8.RECIPES["deepseek_v3"])
    assert (got - total).abs().max() <= 4 * 2.0**-23 * total.abs().max()


def test_deepseek_v3_promotion_removes_the_error_of_long_sums():
    """Section 3.3.2: "a maximum relative error of nearly 2%" at K = 4096 without promotion. The
    paper gives no distribution; operands in [0, 1) have 7% here. A sum of all 4096 products is
    truncated relative to its own size in each of 128 steps, a promoted one in 4."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.rand(8, 4096, generator=generator) for _ in range(2))
    recipe = fp8.RECIPES["deepseek_v3"]
    one = fp8.Cast(format="e4m3", scaling="tensor")
    long = dataclasses.replace(recipe, input=one, weight=one, grad=one, promote=0)

    def error(recipe: fp8.Recipe) -> float:
        exact = linear(x, w, recipe=dataclasses.replace(recipe, accumulate=None, promote=0))
        return float(((linear(x, w, recipe=recipe) - exact) / exact).abs().max())

    assert 0.02 < error(long) < 0.1
    assert error(recipe) < error(long) * 4 / 128


NV, FOUR_OVER_SIX = (fp8.RECIPES[name].input for name in ("nvfp4", "four_over_six"))


def test_four_over_six_is_exact_where_its_paper_says():
    """arXiv:2512.02010, section 3: the block 10, 20, 30, 40 has a mean squared error of 4.33 with
    the scale 6.5 and none with the scale 10. The largest magnitude of the tensor makes its unit 1
    under both rules: 6 * 448 and 6 * 256."""
    block = torch.tensor([10.0, 20, 30, 40] * 4)
    for cast, top, error in ((NV, 448, 4.33), (FOUR_OVER_SIX, 256, 0.0)):
        x = torch.stack([block, torch.full((16,), 6.0 * top)])
        found = (cast_forward(x, cast) - x)[0].square().mean()
        assert round(float(found), 2) == error


def test_four_over_six_takes_the_better_of_two_scales():
    """With one unit, 1, no block has a larger error than under either scale alone."""
    x = randn(512, 64) * torch.exp2(3 * randn(512, 1, seed=1))
    x[0] = 6.0 * 256
    tiles = x.unflatten(1, (-1, 16))
    assert (x.abs() <= 6 * 256).all()

    def error(scale: Tensor) -> Tensor:
        y = fp8.quantize((tiles / scale), "e2m1") * scale
        return (y - tiles).square().sum(-1)

    amax = tiles.abs().amax(-1, keepdim=True)
    six, four = (fp8.quantize(amax / top, "e4m3").clamp(min=2.0**-9) for top in (6, 4))
    got = (cast_forward(x, FOUR_OVER_SIX).unflatten(1, (-1, 16)) - tiles).square().sum(-1)
    best = torch.minimum(error(six), error(four))
    torch.testing.assert_close(got, best, rtol=1e-5, atol=1e-9)
    assert (error(six) < error(four)).any()
    assert (error(four) < error(six)).any()


def test_mxfp8_and_nvfp4_are_the_recipes_of_nvidia():
    """arXiv:2506.08027, section 3: e4m3 for weights, activations and gradients, scales rounded up.
    arXiv:2509.25149, section 4: e2m1, weights in 16 x 16, stochastic gradients, a rotation of 16
    in the weight gradient alone."""
    mxfp8, nvfp4 = fp8.RECIPES["mxfp8"], fp8.RECIPES["nvfp4"]
    assert {(c.format, c.scaling, c.rule, c.tile) for c in mxfp8.casts if c} == {
        ("e4m3", "mx", "up", (1, 32))
    }
    grads = (nvfp4.grad_input[0], nvfp4.grad_weight[0])
    assert all(c is not None and c.rounding == "stochastic" for c in grads)
    assert {c.tile for c in (nvfp4.weight, nvfp4.grad_input[1]) if c} == {(16, 16)}
    assert [c.hadamard for c in nvfp4.casts if c] == [0, 0, 0, 0, 16, 16]
    assert {(c.format, c.rule) for c in nvfp4.casts if c} == {("e2m1", "e4m3")}


QUARTET2, TETRAJET2 = (fp8.RECIPES[name] for name in ("quartet2", "tetrajet2"))
EDEN = QUARTET2.grad
NEAREST = dataclasses.replace(EDEN, rule="e4m3")


def draws(x: Tensor, cast: fp8.Cast, count: int) -> Tensor:
    """Casts of the rows of ``x`` with new random bits and signs each, rotated back: multiplied by
    the transpose of the matrix, then by the signs. float64, (count, rows, columns)."""
    torch.manual_seed(0)
    found = []
    for _ in range(count):
        signs = turn_of(spec_of(cast), x)
        y = rounded(x, spec_of(cast), turn=signs)[0].double()
        back = y.unflatten(-1, (-1, cast.hadamard)) @ rotation(cast.hadamard)
        found.append((back * signs).flatten(-2))
    return torch.stack(found)


def stochastic(x: Tensor) -> Tensor:
    """Unbiased stochastic rounding with the same blocks and scale format: 17 / 16 of the largest
    magnitude stand for 6, so that a scale that e4m3 rounds down by a 16th saturates nothing."""
    tiles = x.unflatten(1, (-1, 16))
    top = tiles.abs().amax(-1, keepdim=True) * 17 / 16 / 6
    unit = top.max() / 256
    scale = fp8.quantize(top / unit, "e4m3") * unit
    assert (tiles.abs() <= 6 * scale).all()
    return (fp8.quantize(tiles / scale, "e2m1", rounding="stochastic", seed=0) * scale).flatten(1)


def test_ms_eden_has_less_than_half_the_error_of_stochastic_rounding():
    """arXiv:2601.22813, abstract: "more than 2x lower quantization error"; on normal data."""
    x = randn(64, 1024)
    eden, nearest = (float((draws(x, cast, 2) - x).square().mean()) for cast in (EDEN, NEAREST))
    assert eden < (stochastic(x) - x).square().mean() / 2
    assert nearest < eden


def test_ms_eden_is_unbiased():
    """The mean of n draws has an n-th of the squared error of one, and no smaller projection on x;
    rounding to nearest after the same rotations shrinks it."""
    x, count = randn(16, 256), 120
    for cast, unbiased in ((EDEN, True), (NEAREST, False)):
        y = draws(x, cast, count)
        left = (y.mean(0) - x).square().mean() / ((y - x).square().mean() / count)
        slopes = (y * x).sum((1, 2)) / x.double().square().sum()
        deviation = float((slopes.mean() - 1) / (slopes.std() / count**0.5))
        assert (left < 1.1) == unbiased, (cast, left)
        assert (abs(deviation) < 4) == unbiased, (cast, deviation)


def test_ms_eden_corrects_the_scales_of_what_is_rotated_together():
    """The identity behind it, for each rotated block: <x, Q(x)> = <x, x>, if scales are not rounded
    again. They are e4m3 values, two neighbours of the corrected one."""
    x = randn(8, 256)
    spec = spec_of(dataclasses.replace(EDEN, signs="fixed"))
    turned = rotated(x, 128, -1)
    codes = [quantized(x, spec, axis=-1) for _ in range(200)]
    steps = torch.stack([c.scale / c.unit for c in codes]).unflatten(-1, (2, 8))
    assert torch.equal(steps, steps.to(torch.float8_e4m3fn).float())
    assert all(torch.equal(c.values, codes[0].values) for c in codes)
    tiles = (turned * codes[0].values).unflatten(-1, (2, 8, 16)).double().sum(-1)
    found = (tiles * steps * codes[0].unit).sum(-1)
    wanted = turned.double().square().unflatten(-1, (2, 128)).sum(-1)
    error = (found.mean(0) - wanted) / (found.std(0) / 200**0.5)
    assert error.abs().max() < 5
    spread = steps.amax(0) - steps.amin(0)
    assert (spread <= steps.amin(0) / 8).all()  # one step of e4m3


def test_quartet2_and_tetrajet2_cast_as_their_published_code():
    """IST-DASLab/Quartet-II: four over six in blocks of one row forward; backward, MS-EDEN in
    rotations of 128. thu-ml/TetraJet-v2: nearest forward; backward, stochastic in rotations of
    16."""
    assert {(c.rule, c.tile, c.hadamard) for c in QUARTET2.forward} == {("e4m3_4_6", (1, 16), 0)}
    assert {(c.rounding, c.tile, c.hadamard) for c in TETRAJET2.forward} == {
        ("nearest", (1, 16), 0)
    }
    for recipe, cast in ((QUARTET2, EDEN), (TETRAJET2, TETRAJET2.grad)):
        assert {*recipe.grad_input, *recipe.grad_weight} == {cast}
        assert (cast.format, cast.scaling, cast.signs) == ("e2m1", "nv", "random")
    assert (EDEN.rule, EDEN.rounding, EDEN.hadamard) == ("e4m3_eden", "nearest", 128)
    assert (TETRAJET2.grad.rounding, TETRAJET2.grad.hadamard) == ("stochastic", 16)


def test_the_uniform_grid_has_no_shrinkage_bias():
    """arXiv:2606.20381: of values that are spread evenly over the bin of a grid point, e2m1 rounds
    those toward zero on average that are next to a longer step, at 2 and 4; e1m2 none."""
    for format, biased in (("e2m1", {2.0: -0.125, 4.0: -0.25}), ("e1m2", {})):
        top = fp8.FORMATS[format].max
        x = (torch.arange(2**16, dtype=torch.float64) + 0.5) * (top / 2**16)
        y = fp8.quantize(x, format)
        for value in y.unique()[1:-1].tolist():  # the bins of zero and of the largest are cut
            bias = float((y - x)[y == value].mean())
            assert abs(bias - biased.get(value, 0.0)) < top / 2**16


def test_mx_scales_by_error_are_the_best_of_all_rules():
    x = randn(256, 64) * torch.exp2(3 * randn(256, 1, seed=1))

    def errors(rule: str) -> Tensor:
        cast = fp8.Cast(format="e2m1", scaling="mx", rule=rule)
        return (cast_forward(x, cast) - x).double().square().unflatten(1, (-1, 32)).sum(-1)

    found = errors("error")
    others = torch.stack([errors(rule) for rule in ("up", "floor", "ceil", "even")])
    assert torch.equal(found, others.amin(0))
    assert (found < others).any(1).all()  # each of the four is worse somewhere


def test_a_mean_is_multiplied_in_high_precision():
    """arXiv:2603.10444: rows with a common mean, large in a few channels, which determine the
    scales of blocks. A product is that of the mean, uncast, and of the rest; so is its gradient."""
    x = (randn(64, 96) + 40 * (randn(96, seed=1) > 1.5)).requires_grad_()
    w, g = randn(48, 96, seed=2).requires_grad_(), randn(64, 48, seed=3)
    mean = x.detach().mean(0)
    rest = x.detach() - mean

    def close(got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))

    for scaling, format in (("nv", "e2m1"), ("tensor", "e4m3")):
        plain = fp8.Cast(format=format, scaling=scaling)
        around = dataclasses.replace(plain, mean=True)
        y = linear(x, w, recipe=fp8.Recipe(name="mean", input=around, weight=plain))
        dx, dw = torch.autograd.grad(y, (x, w), g)
        weight = cast_forward(w.detach(), plain)
        close(y.detach(), cast_forward(rest, plain) @ weight.mT + mean @ weight.mT)
        close(dx, g @ cast_forward(w.detach(), plain, -2))
        close(dw, g.mT @ cast_forward(rest, plain, -2) + g.sum(0)[:, None] * mean)
        errors = [float((cast_forward(x, cast) - x).detach().norm()) for cast in (around, plain)]
        assert errors[0] < errors[1] / 3


def test_a_mean_is_rotated_with_the_rest():
    """With a format as precise as float32, along both axes; float16 is rounded once."""
    wide = fp8.Format(name="wide", exponent_bits=8, mantissa_bits=23, bias=127, max=2.0**127)
    cast = fp8.Cast(format=wide, mean=True, hadamard=16)
    recipe = fp8.Recipe(name="mean", input=cast, weight=cast, grad=cast)
    x, w, g = randn(40, 24), randn(20, 24, seed=1), randn(40, 20, seed=2)
    found = []
    for chosen in (recipe, None):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = linear(*leaves, recipe=chosen)
        found.append((y, *torch.autograd.grad(y, leaves, g)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
    half = x.half()
    assert torch.equal(cast_forward(half, dataclasses.replace(cast, hadamard=0)), half)


HOT = 7
"""Channels with a residual."""


@pytest.mark.parametrize(
    ("scaling", "format"), [("nv", "e2m1"), ("mx", "e4m3"), ("tensor", "e4m3")]
)
def test_hot_channels_are_more_columns_of_the_product(scaling, format):
    """arXiv:2602.02047, arXiv:2601.07475: a product whose input has a residual is the product of
    the cast operands, with the cast errors of the hot channels as more columns of one, and the same
    columns once more of the other. In the gradient of the weight they are more rows to add."""
    x = randn(64, 96)
    x[:, 5:90:15] *= 40
    w, g = randn(48, 96, seed=1), randn(64, 48, seed=2)
    plain = fp8.Cast(format=format, scaling=scaling)
    patched = dataclasses.replace(plain, residual=HOT)
    recipe = fp8.Recipe(name="hot", input=patched, weight=plain, grad_weight_grad=None)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = linear(*leaves, recipe=recipe)
    dx, dw = torch.autograd.grad(y, leaves, g)

    def columns(axis: int) -> tuple[Tensor, Tensor, Tensor]:
        """The cast input, the channels with the largest errors, and their cast errors."""
        cast = cast_forward(x, plain, axis)
        hot = (x - cast).norm(dim=0).argsort(descending=True)[:HOT]
        return cast, hot, cast_forward((x - cast)[:, hot], plain, axis)

    def close(got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))

    weight, (cast, hot, more) = cast_forward(w, plain), columns(-1)
    assert set(range(5, 90, 15)) <= set(hot.tolist())
    close(y.detach(), torch.cat([cast, more], 1) @ torch.cat([weight, weight[:, hot]], 1).mT)
    close(dx, g @ cast_forward(w, plain, -2))
    cast, hot, more = columns(-2)
    close(dw, (g.mT @ cast).index_add(1, hot, g.mT @ more))
    cast, hot, _ = columns(-1)
    errors, before = cast_forward(x, patched) - x, cast - x
    assert float(errors[:, hot].norm()) < float(before[:, hot].norm()) / 3
    others = [channel for channel in range(96) if channel not in hot.tolist()]
    assert torch.equal(errors[:, others], before[:, others])


def test_a_residual_of_all_channels_is_a_cast_of_the_error():
    """NaN and Inf stay where they are; more channels than there are, none, and compiled code."""
    plain, x = fp8.Cast(format="e5m2"), randn(5, 6)
    x[1, 2], x[3, 4] = torch.inf, torch.nan
    both = dataclasses.replace(plain, residual=4096)
    once = cast_forward(x, plain)
    wanted = once + cast_forward((x - once).nan_to_num(0, 0, 0), plain)
    torch.testing.assert_close(cast_forward(x, both), wanted, rtol=0, atol=0, equal_nan=True)
    assert cast_forward(x[:, :0], both).shape == (5, 0)
    assert cast_forward(x[:0], both).shape == (0, 6)
    recipe = fp8.Recipe(name="both", input=both, weight=both, grad=both)
    a, b = randn(8, 16).requires_grad_(), randn(4, 16, seed=1).requires_grad_()

    def forward(a: Tensor, b: Tensor) -> Tensor:
        with fp8.autocast(recipe):
            return torch.nn.functional.linear(a, b)

    found = []
    for call in (forward, torch.compile(forward, fullgraph=True, backend="aot_eager")):
        y = call(a, b)
        found.append((y, *torch.autograd.grad(y, (a, b), torch.ones_like(y))))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


QUARTET = fp8.RECIPES["quartet"]


def test_quartet_clips_normal_data_where_its_error_is_smallest():
    """The constant of the published code, 2.92247856 standard deviations for the value 6 of e2m1:
    of clips in steps of 0.005 it is next to the one with the smallest mean squared error."""
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    clips = CLIP + 0.005 * torch.arange(-20, 21, dtype=torch.float64)
    errors = torch.stack(
        [
            ((fp8.quantize(x * (6 / c), "e2m1") * (c / 6) - x).square() * density).sum()
            for c in clips.tolist()
        ]
    )
    assert abs(int(errors.argmin()) - 20) <= 1


def test_quartet_casts_as_its_published_code():
    """IST-DASLab/Quartet, in a loop over blocks of 32: forward, the power of two below 0.487
    standard deviations; backward, 4 / 3 of the power of two below the largest magnitude, divided by
    4, and signs that change."""
    x = randn(8, 96) * torch.exp2(3 * randn(8, 1, seed=1))
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    for cast, power in (
        (
            QUARTET.input,
            lambda b: 2.0 ** math.floor(math.log2(2.92247856 / 6 * b.std(correction=0))),
        ),
        (QUARTET.grad, lambda b: 2.0 ** (math.floor(math.log2(b.abs().max())) - 2) / 0.75),
    ):
        plain = dataclasses.replace(cast, hadamard=0, signs="fixed", rounding="nearest")
        got = cast_forward(x, plain).double().unflatten(1, (3, 32)).flatten(0, 1)
        for block, y in zip(x.double().unflatten(1, (3, 32)).flatten(0, 1), got, strict=True):
            scale = power(block)
            near = ((block / scale).abs()[:, None] - values).abs().argmin(1)
            torch.testing.assert_close(y, values[near] * block.sign() * scale, rtol=1e-6, atol=0)
    assert {(c.hadamard, c.signs) for c in QUARTET.forward} == {(32, "fixed")}
    assert {*QUARTET.grad_input, *QUARTET.grad_weight} == {QUARTET.grad}
    grad = QUARTET.grad
    assert (grad.hadamard, grad.signs, grad.rounding) == (32, "random", "stochastic")


def test_quartet_saturates_no_gradient_and_is_unbiased():
    """3/4 of the largest magnitude of a block is at most 6 in units of MX (arXiv:2502.20586), so
    the mean of n stochastic casts has an n-th of the squared error of one."""
    x, count = torch.cat([randn(64, 32), 1 + randn(64, 32, seed=1).abs()]), 100
    cast = dataclasses.replace(QUARTET.grad, hadamard=0, signs="fixed")
    scale = scale_of(x, (-1,), fp8.FORMATS["e2m1"], "fit")
    most = x.abs().amax(1, keepdim=True) / scale
    assert (most <= 6).all()
    assert (most > 5.8).any()
    torch.manual_seed(0)
    y = torch.stack([cast_forward(x, cast).double() for _ in range(count)])
    left = (y.mean(0) - x).square().mean() / ((y - x).square().mean() / count)
    assert 0.9 < left < 1.1


def test_ufp4_is_the_uniform_grid_rotated_in_all_products():
    """arXiv:2606.20381: blocks of 16 with float32 scales, none square, stochastic rounding of the
    gradient alone. What its rotations are for: normal data, as they make it, has a smaller error
    on the uniform grid than in e2m1 with the same scales."""
    ufp4 = fp8.RECIPES["ufp4"]
    assert {(c.format, c.tile, c.rule, c.hadamard) for c in ufp4.casts} == {
        ("e1m2", (1, 16), "exact", 16)
    }
    assert [c.rounding for c in (ufp4.input, ufp4.weight)] == ["nearest"] * 2
    assert {ufp4.grad_input[0].rounding, ufp4.grad_weight[0].rounding} == {"stochastic"}
    x = randn(256, 128)
    errors = [
        float((cast_forward(x, dataclasses.replace(ufp4.input, format=f)) - x).square().mean())
        for f in ("e1m2", "e2m1")
    ]
    assert errors[0] < errors[1]


def test_coat_casts_as_its_published_code():
    """NVlabs/COAT: per tensor, the largest magnitude divided by 448 (gradients: 57344), e4m3
    forward and e5m2 backward; and the input of an activation is kept in a byte."""
    coat, x = fp8.RECIPES["coat"], randn(40, 64)
    for cast, dtype, top in (
        (coat.input, torch.float8_e4m3fn, 448),
        (coat.grad, torch.float8_e5m2, 57344),
    ):
        scale = x.abs().max() / top
        assert torch.equal(cast_forward(x, cast), (x / scale).to(dtype).float() * scale)
    assert coat.input == coat.weight == coat.saved_activations
    kept: list[Tensor] = []
    x.requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        fp8.autocast("coat"),
    ):
        F.silu(x)
    assert sum(t.nbytes for t in kept) == x.numel() + 4  # and a scale; bfloat16 has twice as much


def test_moss_has_two_levels_of_scales():
    """arXiv:2511.05811: s = max(s_i) of the blocks' s_i = max |x| / 448, and s times the power of
    two above s_i / s: nothing saturates, and no scale is twice the exact one. Theorem 1: less error
    than a scale for the tensor has, on activations with outliers less than blocks of 128 too."""
    x = randn(64, 256) * torch.exp2(2 * randn(64, 256, seed=1))
    moss = fp8.RECIPES["moss"]
    tiles = x.unflatten(1, (-1, 32))
    own = tiles.abs().amax(-1, keepdim=True) / 448
    scale = own.max() * torch.exp2(torch.log2(own / own.max()).ceil())
    assert (own <= scale * (1 + 2.0**-22)).all()
    assert (scale < 2 * own).all()
    wanted = ((tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(1)
    torch.testing.assert_close(cast_forward(x, moss.input), wanted, rtol=1e-6, atol=0)
    casts = (
        moss.input,
        fp8.Cast(format="e4m3", scaling="block", rule="exact"),
        fp8.Cast(format="e4m3", scaling="tensor", rule="exact"),
    )
    y = randn(64, 256) * torch.exp2(8 * randn(64, 256, seed=2))  # small values become subnormal
    errors = [float((cast_forward(y, cast) / y - 1).square().mean()) for cast in casts]
    assert errors == sorted(errors)


def test_fog_smooth_swiglu_and_mus_are_the_casts_that_their_papers_state():
    """arXiv:2505.20524: delayed scales of 1024 passes without a margin, of all products, those
    inside of attention too. arXiv:2409.12517: delayed scales. arXiv:2502.05967: static ones, 1 for
    unit scaling, and clipping before the cast. All: e4m3 forward, e5m2 for gradients."""
    fog, smooth, mus = (fp8.RECIPES[name] for name in ("fog", "smooth_swiglu", "mus"))
    for recipe in (fog, *fog.attention, smooth, mus):
        assert [c.format for c in recipe.casts] == [*["e4m3"] * 2, "e5m2", "e4m3", "e5m2", "e4m3"]
    delayed = {(c.scaling, c.history, c.margin) for r in (fog, *fog.attention) for c in r.casts}
    assert delayed == {("delayed", 1024, 0)}
    assert {c.scaling for c in smooth.casts} == {"delayed"}
    x = torch.tensor([500.0, -1e6, 1.0])
    assert cast_forward(x, mus.input).tolist() == [448.0, -448.0, 1.0]


def test_a_smoothed_swiglu_is_the_same_function_with_less_error():
    """arXiv:2409.12517: the linear branch divided by a scale of each channel, its largest
    magnitude, which the weight of the down projection is multiplied by. With an outlier channel the
    other channels of a tensor with one scale are subnormal or zero in e4m3."""
    gate, linear_, down = randn(64, 32), randn(64, 32, seed=1), randn(16, 32, seed=2)
    linear_[:, 3] *= 2.0**16
    scale = torch.exp2(linear_.abs().amax(0).log2().ceil())
    smooth = F.silu(gate) * (linear_ / scale)
    exact = F.silu(gate) * linear_ @ down.mT
    torch.testing.assert_close(smooth @ (down * scale).mT, exact)
    cast = dataclasses.replace(fp8.RECIPES["smooth_swiglu"].input, scaling="tensor", history=None)
    both = ((F.silu(gate) * linear_, 1.0), (smooth, scale))
    others = torch.arange(32) != 3
    errors = [
        float(((cast_forward(h, cast) * s - F.silu(gate) * linear_)[:, others]).norm())
        for h, s in both
    ]
    assert errors[1] < errors[0] / 10
