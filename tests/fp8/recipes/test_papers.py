"""Rows of `fp8.RECIPES` against identities of their papers; numbers are in tests/published."""

import dataclasses

import pytest
import torch

import fp8
from fp8.casts.casting import cast_forward, quantized, rounded
from fp8.casts.rotation import rotated, rotation_signs
from fp8.lab.sums.dot import dot
from fp8.products.matmul import linear
from fp8.recipes.tensor_cores import TENSOR_CORES
from tests.reference import rotation
from tests.shared import assert_same, normal, pairs, parametrize

E4M3_LOW = -6


def e4m3(x, rows):
    """Values of tiles of (rows, 128), and their scales: the largest magnitude / 448."""
    tiles = x.unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    values = (tiles / scale).to(torch.float8_e4m3fn).float()
    scale = scale.squeeze(3).expand(-1, rows, -1).flatten(0, 1)
    return values.flatten(2).flatten(0, 1), scale


def cast_with_signs(x, cast):
    """``x`` cast, ``x`` rotated as in the cast, and the random signs of the rotation."""
    spec = cast
    signs = rotation_signs(spec, x)
    y, _ = rounded(x, spec, signs=signs)
    return y, rotated(x, spec.hadamard, -1, signs) if spec.hadamard else x, signs


def unrotated(cast, **changes):
    return dataclasses.replace(cast, hadamard=0, signs="fixed", **changes)


def remaining(draws, x):
    """The squared error of the mean of draws, relative to that of unbiased draws."""
    return (draws.mean(0) - x).square().mean() / (
        (draws - x).square().mean() / len(draws)
    )


def test_deepseek_v3_adds_every_128_products_in_float32():
    """Section 3.3.2: the tensor core sums 128 products, then the scales of both tiles multiply the
    sum, which is added in float32."""
    x, w = normal(5, 512), normal(256, 512, seed=1)
    (a, of_a), (b, of_b) = e4m3(x, 1), e4m3(w, 128)
    total = torch.zeros(5, 256, dtype=torch.float64)
    for i, at in enumerate(range(0, 512, 128)):
        operands = (t[:, at : at + 128] for t in (a, b))
        piece = dot(*operands, (E4M3_LOW, E4M3_LOW), TENSOR_CORES["hopper"])
        total += piece.double() * (of_a[:, i, None] * of_b[None, :, i]).double()
    got = linear(x, w, recipe=fp8.RECIPES["deepseek_v3"])
    assert (got - total).abs().max() <= 4 * 2.0**-23 * total.abs().max()


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


@parametrize("name", PUBLISHED)
def test_casts_are_the_published_ones(name):
    assert fp8.RECIPES[name].casts == tuple(
        fp8.Cast(**fields) for fields in PUBLISHED[name]
    )
    for cast, other in pairs(
        *(fp8.RECIPES[n].casts for n in ("nvfp4", "nvfp4_nvidia"))
    ):
        rule = "e4m3_up" if other.rounding == "stochastic" else "e4m3"
        assert cast == dataclasses.replace(other, rule=rule)


STOCHASTIC = [n for n, r in fp8.RECIPES.items() if r.grad and r.grad.is_random]


@parametrize("name", STOCHASTIC)
@parametrize("data", ["heavy", "decades"])
def test_stochastic_gradients_are_unbiased(name, data):
    """Their projection on what is cast, over all draws and rows, but for NVIDIA's arithmetic."""
    x, cast = normal(64, 256), fp8.RECIPES[name].grad
    if data == "heavy":
        x = x / normal(3, 64, 256, seed=1).square().sum(0).sqrt()
    else:  # the last scales are subnormal in e4m3
        x = x * torch.logspace(0, -6, 64)[:, None]
    slopes = []
    for _ in range(100):
        y, z, _ = cast_with_signs(x, cast)
        slopes.append((y.double() * z).sum(1) / z.double().square().sum(1) - 1)
    means = torch.stack(slopes).mean(1)  # rows of all sizes count alike
    deviation = float(means.mean() / (means.std() / len(means) ** 0.5))
    assert (abs(deviation) < 4) == (name != "nvfp4_nvidia"), deviation
    if cast.rule != "e4m3" and cast.rounding == "stochastic":
        # No value is beyond the format by more than float32 rounds.
        scale = quantized(x, unrotated(cast, rounding="nearest")).scale
        assert (
            x.abs() <= 6 * scale.repeat_interleave(cast.tile[1], 1) * (1 + 2.0**-20)
        ).all()


EDEN = fp8.RECIPES["quartet2"].grad
NEAREST = dataclasses.replace(EDEN, rule="e4m3")


def draws(x, cast, count):
    """Casts of the rows of ``x`` with new random bits and signs each, rotated back: multiplied by
    the transpose of the matrix, then by the signs. float64, (count, rows, columns)."""
    torch.manual_seed(0)
    found = []
    for _ in range(count):
        y, _, signs = cast_with_signs(x, cast)
        back = y.double().unflatten(-1, (-1, cast.hadamard)) @ rotation(cast.hadamard)
        found.append((back * signs).flatten(-2))
    return torch.stack(found)


def test_where_ms_eden_is_unbiased():
    """The mean of n draws has an n-th of the squared error of one, and no smaller projection on x;
    rounding to nearest after the same rotations shrinks it. The mean of 13 tokens, which zeros fill
    up to the 128 of a rotation, stays off by 0.6 %."""
    usual, count = normal(16, 256), 120
    few = torch.cat([normal(64, 13), torch.zeros(64, 115)], 1)
    for cast, x, unbiased, projects in (
        (EDEN, usual, True, True),
        (NEAREST, usual, False, False),
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


def test_fp4_weights_are_fp8_weights_while_their_exponents_span_at_most_14():
    """DeepSeek-V4 trains on FP4 weights in FP8 products: MXFP4 is a subset of e4m3 in tiles of
    128 x 128 with scales of powers of two. Against float64, for each span and code."""
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    tile = torch.cat([codes, -codes]).repeat(128, 8)
    cast = fp8.RECIPES["block"].weight
    for span in range(40):
        exponents = torch.zeros(128, 4, dtype=torch.float64)
        exponents[1::2] = -torch.arange(256).remainder(span + 1).view(64, 4).double()
        exponents[-1, -1] = -span
        scale = 2.0 ** exponents.repeat_interleave(32, 1)
        weight = tile * scale
        assert_same(fp8.quantize(weight, "e2m1", scale=scale), weight)
        # 6 of the largest exponent is 384 of 448; the steps of e4m3 end at 2**-9.
        scaled = weight * 2.0**6
        step = 2.0 ** (scaled.abs().clamp(min=2.0**E4M3_LOW).log2().floor() - 3)
        want = (scaled / step).round() * step / 2.0**6
        got, _ = rounded(weight.float(), cast)
        assert_same(got.double(), want)
        assert torch.equal(want, weight) == (span <= 14)
