"""Rows of `fp8.RECIPES` against identities of their papers; numbers are in tests/published."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import fp8
from fp8.casts.casting import cast_forward, lowered, quantized, rounded
from fp8.casts.rotation import rotated, rotation_signs
from fp8.lab.sums.arithmetic import Matrix
from fp8.lab.sums.dot import dot
from fp8.products.matmul import linear
from fp8.recipes.rules import CLIP
from fp8.recipes.scaling import scale_of
from fp8.recipes.tensor_cores import TENSOR_CORES
from tests.fp8.oracles import randn
from tests.reference import rotation

E4M3_LOW = -6


def e4m3(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Values of tiles of (rows, 128), and their scales: the largest magnitude / 448."""
    tiles = x.unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    values = (tiles / scale).to(torch.float8_e4m3fn).float()
    scale = scale.squeeze(3).expand(-1, rows, -1).flatten(0, 1)
    return values.flatten(2).flatten(0, 1), scale


def cast_with_signs(x: Tensor, cast: fp8.Cast) -> tuple[Tensor, Tensor, Tensor | None]:
    """``x`` cast, ``x`` rotated as in the cast, and the random signs of the rotation."""
    spec = lowered(cast)
    signs = rotation_signs(spec, x)
    y, _ = rounded(x, spec, signs=signs)
    return y, rotated(x, spec.hadamard, -1, signs) if spec.hadamard else x, signs


def unrotated(cast: fp8.Cast, **changes: str) -> fp8.Cast:
    return dataclasses.replace(cast, hadamard=0, signs="fixed", **changes)


def remaining(draws: Tensor, x: Tensor) -> Tensor:
    """The squared error of the mean of draws, relative to that of unbiased draws."""
    return (draws.mean(0) - x).square().mean() / ((draws - x).square().mean() / len(draws))


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
    """Section 3.3.2. A sum of all 4096 products is truncated relative to its own size in each of
    128 steps, a promoted one in 4."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.rand(8, 4096, generator=generator) for _ in range(2))
    recipe = fp8.RECIPES["deepseek_v3"]
    one = fp8.Cast(format="e4m3", scaling="tensor")
    long = dataclasses.replace(recipe, input=one, weight=one, grad=one, promote=0)

    def error(recipe: fp8.Recipe) -> float:
        exact = linear(x, w, recipe=dataclasses.replace(recipe, accumulate=None, promote=0))
        return float(((linear(x, w, recipe=recipe) - exact) / exact).abs().max())

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


VECTOR = {"format": "e2m1", "scaling": "nv", "rule": "e4m3"}
STOCHASTIC_GRAD = {**VECTOR, "rounding": "stochastic"}
RANDOM = {"hadamard": 16, "signs": "random"}
EDEN_CAST = {**VECTOR, "rule": "e4m3_eden", "hadamard": 128, "signs": "random"}
PUBLISHED = {
    # arXiv:2506.08027, section 3: e4m3 for all, scales rounded up.
    "mxfp8": [{"format": "e4m3", "scaling": "mx", "rule": "up"}] * 6,
    # arXiv:2509.25149, section 4: e2m1, weights in 16 x 16, stochastic gradients, a rotation of 16
    # in the weight gradient alone.
    "nvfp4_nvidia": [
        *(VECTOR, {**VECTOR, "tile": (16, 16)}),
        *(STOCHASTIC_GRAD, {**VECTOR, "tile": (16, 16)}),
        *({**STOCHASTIC_GRAD, "hadamard": 16}, {**VECTOR, "hadamard": 16}),
    ],
    # IST-DASLab/Quartet-II: four over six in blocks of one row forward; backward, MS-EDEN in
    # rotations of 128.
    "quartet2": [{**VECTOR, "rule": "e4m3_4_6"}] * 2 + [EDEN_CAST] * 4,
    # thu-ml/TetraJet-v2: nearest forward; backward, stochastic in rotations of 16.
    "tetrajet2": [VECTOR] * 2 + [{**STOCHASTIC_GRAD, "rule": "e4m3_up", **RANDOM}] * 4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_casts_are_the_published_ones(name):
    assert fp8.RECIPES[name].casts == tuple(fp8.Cast(**fields) for fields in PUBLISHED[name])
    for cast, other in zip(*(fp8.RECIPES[n].casts for n in ("nvfp4", "nvfp4_nvidia")), strict=True):
        rule = "e4m3_up" if other.rounding == "stochastic" else "e4m3"
        assert cast == dataclasses.replace(other, rule=rule)


GUARDED = fp8.Cast(format="e2m1", scaling="nv", rule="e4m3_guarded", rounding="stochastic")


STOCHASTIC = [n for n, r in fp8.RECIPES.items() if r.grad and lowered(r.grad).is_random]


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("data", ["normal", "heavy", "decades"])
def test_stochastic_gradients_are_unbiased(name, data):
    """Their projection on what is cast, over all draws and rows, but for NVIDIA's arithmetic."""
    x, cast = randn(64, 256), fp8.RECIPES[name].grad
    if data == "heavy":
        x = x / randn(3, 64, 256, seed=1).square().sum(0).sqrt()
    elif data == "decades":  # the last scales are subnormal in e4m3
        x = x * torch.logspace(0, -6, 64)[:, None]
    slopes = []
    torch.manual_seed(0)
    for _ in range(100):
        y, z, _ = cast_with_signs(x, cast)
        slopes.append((y.double() * z).sum(1) / z.double().square().sum(1) - 1)
    means = torch.stack(slopes).mean(1)  # rows of all sizes count alike
    deviation = float(means.mean() / (means.std() / len(means) ** 0.5))
    assert (abs(deviation) < 4) == (name != "nvfp4_nvidia"), deviation
    if cast.rule != "e4m3" and cast.rounding == "stochastic":
        # No value is beyond the format by more than float32 rounds.
        scale = quantized(x, lowered(unrotated(cast, rounding="nearest"))).scale
        assert (x.abs() <= 6 * scale.repeat_interleave(cast.tile[1], 1) * (1 + 2.0**-21)).all()


EDEN = fp8.RECIPES["quartet2"].grad
NEAREST = dataclasses.replace(EDEN, rule="e4m3")


def draws(x: Tensor, cast: fp8.Cast, count: int) -> Tensor:
    """Casts of the rows of ``x`` with new random bits and signs each, rotated back: multiplied by
    the transpose of the matrix, then by the signs. float64, (count, rows, columns)."""
    torch.manual_seed(0)
    found = []
    for _ in range(count):
        y, _, signs = cast_with_signs(x, cast)
        back = y.double().unflatten(-1, (-1, cast.hadamard)) @ rotation(cast.hadamard)
        found.append((back * signs).flatten(-2))
    return torch.stack(found)


def test_ms_eden_has_less_than_half_the_error_of_stochastic_rounding():
    """arXiv:2601.22813, abstract: "more than 2x lower quantization error"; on normal data."""
    x = randn(64, 1024)
    eden, nearest = (float((draws(x, cast, 2) - x).square().mean()) for cast in (EDEN, NEAREST))
    torch.manual_seed(0)
    assert eden < (cast_forward(x, GUARDED) - x).square().mean() / 2
    assert nearest < eden


def test_where_ms_eden_is_unbiased():
    """The mean of n draws has an n-th of the squared error of one, and no smaller projection on x;
    rounding to nearest after the same rotations shrinks it. The mean of 13 tokens, which zeros fill
    up to the 128 of a rotation, stays off by 0.6 %."""
    normal, count = randn(16, 256), 120
    few = torch.cat([randn(64, 13), torch.zeros(64, 115)], 1)
    for cast, x, unbiased, projects in (
        (EDEN, normal, True, True),
        (NEAREST, normal, False, False),
        (EDEN, few, False, True),
    ):
        y = draws(x, cast, count)
        left = remaining(y, x)
        slopes = (y * x).sum((1, 2)) / x.double().square().sum()
        deviation = float((slopes.mean() - 1) / (slopes.std() / count**0.5))
        assert (left < 1.1) == unbiased, (cast, left)
        assert (abs(deviation) < 4) == projects, (cast, deviation)
    variance = (y - x).square().mean() / count
    bias = ((y.mean(0) - x).square().mean() - variance) / few.double().square().mean()
    assert float(bias.sqrt()) == pytest.approx(6e-3, rel=0.3)


def test_ms_eden_corrects_the_scales_of_what_is_rotated_together():
    """The identity behind it, for each rotated block: <x, Q(x)> = <x, x>, if scales are not rounded
    again. They are e4m3 values, two neighbours of the corrected one."""
    x = randn(8, 256)
    spec = lowered(dataclasses.replace(EDEN, signs="fixed"))
    z = rotated(x, 128, -1)
    casts = [quantized(x, spec, axis=-1) for _ in range(200)]
    steps = torch.stack([c.scale / c.unit for c in casts]).unflatten(-1, (2, 8))
    assert torch.equal(steps, steps.to(torch.float8_e4m3fn).float())
    assert all(torch.equal(c.values, casts[0].values) for c in casts)
    tiles = (z * casts[0].values).unflatten(-1, (2, 8, 16)).double().sum(-1)
    found = (tiles * steps * casts[0].unit).sum(-1)
    wanted = z.double().square().unflatten(-1, (2, 128)).sum(-1)
    error = (found.mean(0) - wanted) / (found.std(0) / 200**0.5)
    assert error.abs().max() < 5
    spread = steps.amax(0) - steps.amin(0)
    assert (spread <= steps.amin(0) / 8).all()  # one step of e4m3


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
        (QUARTET.input, lambda b: 2.0 ** (2.92247856 / 6 * b.std(correction=0)).log2().floor()),
        (QUARTET.grad, lambda b: 2.0 ** (b.abs().max().log2().floor() - 2) / 0.75),
    ):
        got = cast_forward(x, unrotated(cast, rounding="nearest")).double()
        got = got.unflatten(1, (3, 32)).flatten(0, 1)
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
    scale = scale_of(x, (-1,), fp8.FORMATS["e2m1"], "fit")
    most = x.abs().amax(1, keepdim=True) / scale
    assert (most <= 6).all()
    assert (most > 5.8).any()
    torch.manual_seed(0)
    y = torch.stack([cast_forward(x, unrotated(QUARTET.grad)).double() for _ in range(count)])
    assert 0.9 < remaining(y, x) < 1.1
