"""Measurements of casts of tensors, for the rows of `docs.papers.NUMBERS`."""

import dataclasses
import functools
import itertools
import math
from collections import namedtuple

import torch
from torch import nn

import fp8
from fp8.optim.encodings import ENCODINGS, decode, write, zeros
from fp8.recipes.scaling import scale_of
from tests.shared import assert_same, seeded

NVFP4 = fp8.RECIPES["nvfp4"].input
GUARDED = dataclasses.replace(NVFP4, rule="e4m3_guarded", rounding="stochastic")
EDEN = fp8.RECIPES["quartet2"].grad


Measured = namedtuple("Measured", "values errors published_errors")
"""Numbers, their standard errors, and those of the published sample; zeros where exact."""


def measured(values, errors, published=None):
    """`Measured`, with a published sample that is so large that its error does not count."""
    return Measured(values, errors, published or [0.0] * len(values))


def normal(*shape, seed=0):
    """N(0, 1), float32."""
    return torch.randn(*shape, generator=seeded(seed))


def quantized(x, cast):
    """``x`` in the format of ``cast``: a product with the identity, whose sums are exact.
    Rotated, it is a multiple of a matrix of signs, which fp16 represents."""
    size = cast.hadamard
    wide = fp8.Cast(format="fp16", hadamard=size, signs=cast.signs) if size else None
    recipe = fp8.Recipe(
        name="identity",
        input=cast,
        weight=wide,
        grad_input_weight=None,
        grad_weight_input=None,
    )
    root = math.sqrt(size or 1)
    with fp8.autocast(recipe):
        return nn.functional.linear(x, torch.eye(x.shape[1]) * root) / root


def e2m1():
    """An integral over the density of the normal distribution."""
    x = torch.linspace(-9, 9, 1_000_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    error = (fp8.quantize(x, "e2m1", scale=0.487079) - x).square()
    return measured([float((error * density).sum() / density.sum())], [0.0])


def statistics(cast, *, spread, rows):
    """(2, rows): for each row of 128 values its relative squared error, and 1 - <x, Q(x)> / <x, x>.
    Magnitudes of rows go up to 2**spread, as in the notebook."""
    torch.manual_seed(0)
    x = normal(rows, 128) * torch.logspace(0, spread, rows, base=2)[:, None]
    y, x = quantized(x, cast).double(), x.double()
    square = x.square().sum(1)
    return torch.stack([(y - x).square().sum(1) / square, 1 - (x * y).sum(1) / square])


def means(casts, which, *, spread=0.0, rows=16384):
    """Means over rows of one of the `statistics`."""
    found = torch.stack(
        [statistics(cast, spread=spread, rows=rows)[which] for cast in casts]
    )
    return measured(
        found.mean(1).tolist(), (found.std(1) / found.shape[1] ** 0.5).tolist()
    )


def by_blocks(rule):
    """Errors in blocks of 1 x 16 and 16 x 16."""
    row = dataclasses.replace(NVFP4, rule=rule)
    return means([row, dataclasses.replace(row, tile=(16, 16))], 0)


def in_units(x, guard):
    """As the published code of Quartet II: blocks of 16, and their scales before they are rounded,
    for ``guard`` times the largest magnitude; both in the unit in which the largest scale is 256,
    and the unit."""
    blocks = x.unflatten(-1, (-1, 16))
    scales = blocks.abs().amax(-1, keepdim=True) * (guard / 6)
    unit = scales.amax() / 256
    return blocks / unit, scales / unit, unit


def eden_emulated():
    """The published correction: <y, y> / <y, Q(y)>, y the values divided by the scales."""
    rows = 65536
    x = normal(rows, 128) * torch.logspace(0, 8, rows, base=2)[:, None]
    x, scales, _ = in_units(x, 17 / 16 * 0.93)
    y = x / fp8.quantize(scales, "e4m3")
    q = fp8.quantize(y, "e2m1")
    correction = y.square().sum((1, 2), keepdim=True) / (y * q).sum(
        (1, 2), keepdim=True
    )
    torch.manual_seed(0)
    step = fp8.quantize(
        fp8.quantize(scales, "e4m3") * correction, "e4m3", rounding="stochastic"
    )
    x, y = x.double(), (q * step).double()
    found = 1 - (x * y).sum((1, 2)) / x.square().sum((1, 2))
    return measured([float(found.mean())], [float(found.std()) / rows**0.5])


class Attention(nn.Module):
    """The product of probabilities and values, of scores less the largest one, as in kernels."""

    def forward(self, scores, top, v):
        """scores: (queries, keys); top: the largest score of each query."""
        return (scores - top).exp() @ v


def flushed():
    """Shares of binomial samples of 2**17 probabilities."""
    scores, v, attention = normal(128, 1024), normal(1024, 8, seed=1), Attention()
    shares = []
    for recipe, top in (
        ("unit", 7.0),
        ("unit", 8.0),
        ("tensor", 12.0),
        ("tensor", 13.0),
    ):
        scores[:, 0] = top  # the sink
        stats = fp8.stats(attention, every=1, sample=scores.numel())
        with fp8.autocast(recipe), stats:
            attention(scores, top, v)
        (row,) = (row for row in stats.rows() if row.operand == "input")
        shares.append(row.zero * 1024 / 1023)
    errors = [math.sqrt(p * (1 - p) / scores.numel()) for p in shares]
    # Half of the last digit of 6.93, where the density is up to 0.4.
    rounding = 0.005 * 0.4 / 5
    return measured(shares, errors, [rounding] * 4)


def sums():
    """Largest errors, which have no standard error."""
    cast = fp8.Cast(format="e4m3", scaling="tensor")
    hopper = fp8.Recipe(
        name="sums", input=cast, weight=cast, grad=cast, accumulate="hopper"
    )
    generator = seeded(0)
    found = []
    for draw, to_each in ((torch.randn, False), (torch.rand, True)):
        x, w = (draw(16, 4096, generator=generator) for _ in range(2))
        results = []
        for recipe in (hopper, dataclasses.replace(hopper, accumulate=None)):
            with fp8.autocast(recipe):
                results.append(nn.functional.linear(x, w))
        size = results[1].abs()
        error = (results[0] - results[1]).abs()
        found.append(float((error / (size if to_each else size.max())).max()))
    return measured(found, [0.0, 0.0])


def converted_twice():
    """Scales of MXFP8 and those after BF16, values the same way."""
    x = normal(1024, 1024) * torch.logspace(0, 1, 1024, base=2)[:, None]
    cast = fp8.RECIPES["mxfp8"].input
    assert cast is not None
    y = quantized(x, cast).bfloat16().float()
    e4m3, rule = fp8.FORMATS["e4m3"], str(cast.rule)
    before, after = (
        scale_of(t.unflatten(1, (-1, 32)), (-1,), e4m3, rule) for t in (x, y)
    )
    return before, after, y, quantized(y, cast)


def mx_scales():
    """A binomial share of 2**15 blocks; the published one is of 1024."""
    before, after, y, _ = converted_twice()
    changed = before != after
    largest = y.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert_same(changed, largest <= 224 * before)  # as published, block by block
    assert_same(before[changed], 2 * after[changed])
    share = float(changed.double().mean())
    deviation = math.sqrt(share * (1 - share))
    return measured([share], [deviation / 2**7.5], [deviation / 2**5])


def mx_values():
    """A count."""
    *_, y, again = converted_twice()
    return measured([float((y != again).sum())], [0.0])


def moments():
    """Adam's moments, (0.9, 0.95), after 60 steps of normal gradients of log-normal sizes."""
    size = torch.exp(0.5 * normal(256, 1024, seed=1))
    m, v = torch.zeros(256, 1024), torch.zeros(256, 1024)
    for step in range(60):
        grad = normal(256, 1024, seed=2 + step) * size
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad * grad
    return m, v


def stored(x, format, *, expanded=False):
    """In blocks of 128 with scales amax / max; expanded: to the power that fills the range of the
    format, around the geometric mean of the block's extremes (COAT's published kernel)."""
    cast = fp8.Cast(format=format, scaling="block", rule="exact")
    if not expanded:
        return quantized(x, cast)
    size = x.abs().unflatten(1, (-1, 128))
    low, high = size.amin(-1, keepdim=True), size.amax(-1, keepdim=True)
    reach = math.log2(fp8.FORMATS[format].max ** 2 / 2)
    power = (reach / (high / low).log2() * 8).floor() / 8
    middle = (high * low).sqrt()
    cast_power = quantized(((size / middle) ** power).flatten(1), cast).unflatten(
        1, (-1, 128)
    )
    return (cast_power ** (1 / power) * middle).flatten(1) * x.sign()


def update_errors(firsts, seconds):
    """(256, first moments, second moments): mean squared errors of m / sqrt(v) in each row."""
    m, v = moments()
    exact = m / v.sqrt()
    pairs = [
        [(a / b.sqrt() - exact).double().square().mean(1) for b in seconds]
        for a in firsts
    ]
    return torch.stack([torch.stack(row, 1) for row in pairs], 1)


def ratios(errors, to):
    """Roots of the means of ``errors`` over those of ``to``, which are of the same moments.

    Published ones: sqrt((a + b / 4) / (a' + b' / 4)), a and b the squared relative errors of m and
    v, 4 times as large in e5m2. The mantissas of other moments change each by up to 20 %, so the
    ratios by up to 2 %: five "standard errors" of 0.4 %."""
    found = (errors.mean(0) / to.mean(0)).sqrt().flatten()
    spread = 0.5 * (errors / to).log().std(0).flatten() / len(errors) ** 0.5
    return measured(found.tolist(), (found * spread).tolist(), (0.004 * found).tolist())


@functools.cache
def errors_of_pairs():
    """Of all pairs of formats, each without expansion and with it."""
    found = []
    for x in moments():
        kinds = itertools.product(("e4m3", "e5m2"), (False, True))
        found.append(
            [stored(x, format, expanded=expanded) for format, expanded in kinds]
        )
    return update_errors(*found)


def adam():
    """The pairs of formats without expansion."""
    errors = errors_of_pairs()[:, ::2, ::2]
    found = ratios(errors, errors[:, :1, :1])
    return Measured(*[numbers[1:] for numbers in found])


def adam_order():
    """All pairs."""
    errors = errors_of_pairs()
    found = torch.tensor(ratios(errors, errors[:, :1, :1]), dtype=torch.float64)
    return Measured(*(20.10 * found).tolist())


def adam_encodings():
    """The optimizer's encodings, whose scales are powers of two."""
    m, v = moments()
    results = []
    for x, name in ((m, "e4m3_block"), (v, "e5m3_block")):
        to = zeros(x.numel(), ENCODINGS[name], x.device)
        write(x.flatten(), to, ENCODINGS[name], None)
        results.append(decode(to).view_as(x))
    ours = update_errors(results[:1], results[1:])
    return ratios(ours, update_errors([stored(m, "e4m3")], [stored(v, "e4m3")]))


MEASURES = {
    "e2m1": e2m1,
    "nvfp4": lambda: by_blocks("e4m3"),
    "four_over_six": lambda: by_blocks("e4m3_4_6"),
    "flushed": flushed,
    "stochastic": lambda: means([GUARDED], 0, spread=8),
    "stochastic_recipe": lambda: means([fp8.RECIPES["nvfp4"].grad], 0, spread=8),
    "stochastic_misalignment": lambda: means(
        [GUARDED, fp8.RECIPES["nvfp4"].grad], 1, spread=8
    ),
    "eden": lambda: means([EDEN], 0, spread=8),
    "eden_misalignment": lambda: means([EDEN], 1, spread=8, rows=65536),
    "eden_emulated": eden_emulated,
    "sums": sums,
    "mx_scales": mx_scales,
    "mx_values": mx_values,
    "adam": adam,
    "adam_order": adam_order,
    "adam_encodings": adam_encodings,
}
