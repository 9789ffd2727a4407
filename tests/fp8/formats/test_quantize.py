"""quantize() against ml_dtypes, gfloat and torch; its arguments, layouts and errors."""

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from gfloat import RoundMode

from fp8 import FORMATS, Format, quantize
from fp8.formats.quantize import operand_grid
from fp8.formats.random_bits import fewer_bits
from fp8.formats.rounding import ROUNDINGS, round_to_grid
from tests.fp8.oracles import (
    GFLOAT,
    all_patterns,
    assert_rounded,
    flush_denormal,
    nearest,
    random_bits,
    random_patterns,
    with_gfloat,
    within,
)
from tests.shared import assert_same, normal, parametrize, proves, refuses, seeded

ROWS = list(FORMATS.values())
CASES = [
    (format, overflow)
    for format in ROWS
    for overflow in ("saturate", "nonfinite")
    if overflow == "saturate" or format.nonfinite is not None
]
IDS = [f"{format}-{overflow}" for format, overflow in CASES]
MODES = {"nearest": RoundMode.TiesToEven, "toward_zero": RoundMode.TowardZero}
BAD_SCALES = (0.0, -1.0, math.nan, math.inf)
NESTED = torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged)


@proves("unit-scaling", "FP16 and FP8")
@parametrize("dtype", [torch.bfloat16, torch.float16])
@parametrize("format, overflow", CASES, ids=IDS)
def test_every_16_bit_pattern(format, overflow, dtype):
    x = all_patterns(dtype)
    got = quantize(x, format, overflow=overflow)
    assert got.dtype == dtype
    assert_rounded(got, nearest(x, format, overflow), x)


@parametrize("format", ROWS)
def test_millions_of_float32_patterns(format):
    overflow = "saturate" if format.nonfinite is None else "nonfinite"
    for seed in range(4 if format.name in ("e4m3", "e5m2") else 1):
        x = random_patterns(250_000, seed)
        assert_rounded(
            quantize(x, format, overflow=overflow), nearest(x, format, overflow), x
        )


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@parametrize("name", ["e4m3", "e5m2"])
def test_every_float32_pattern(name):
    format, size = FORMATS[name], 2**24
    for start in range(-(2**31), 2**31, size):
        x = torch.arange(start, start + size, dtype=torch.int32).view(torch.float32)
        for overflow in ("saturate", "nonfinite"):
            assert_rounded(
                quantize(x, format, overflow=overflow), nearest(x, format, overflow), x
            )


@parametrize("name", GFLOAT)
def test_float64_is_that_of_gfloat(name):
    generator = np.random.default_rng(7)
    numbers = generator.standard_normal(10_000) * 2.0 ** generator.integers(
        -160, 150, 10_000
    )
    x = torch.from_numpy(numbers)
    for rounding, mode in MODES.items():
        want = with_gfloat(x, FORMATS[name], mode, "saturate")
        assert_rounded(quantize(x, name, rounding=rounding), want, x)


@parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@parametrize("format, overflow", [c for c in CASES if c[0].name in GFLOAT])
def test_toward_zero_is_that_of_gfloat(format, overflow, dtype):
    """For every number of 16 bits. Only Inf overflows."""
    x = random_patterns(2**18, 1) if dtype == torch.float32 else all_patterns(dtype)
    if not format.nan:
        x = x[~x.isnan()]  # gfloat has nothing to give
    got = quantize(x, format, rounding="toward_zero", overflow=overflow)
    want = with_gfloat(x, format, RoundMode.TowardZero, overflow)
    finite = within(want.where(x.isfinite(), 0.0), dtype, format, format.max)
    beyond = finite.abs().max()
    if overflow == "nonfinite":
        beyond = torch.tensor(format.nonfinite).double()
    want = torch.where(
        x.isinf(), torch.copysign(beyond, x), want.where(x.isnan(), finite)
    )
    assert_rounded(got, want, x)


@parametrize("name", GFLOAT)
def test_stochastic_is_that_of_gfloat_on_the_same_bits(name):
    format, seed = FORMATS[name], (3, 1, 4)
    # Magnitudes around the format's, whose dropped bits are at most 31: gfloat rounds finer ones,
    # we truncate.
    exponents = torch.arange(
        format.min_exponent - format.mantissa_bits - 7, format.max_exponent + 1
    )
    mantissas = random_patterns(len(exponents) * 300, 2).view(torch.int32) & -0x7F800001
    one = (mantissas | 0x3F800000).view(torch.float32).view(-1, 300).double()
    x = (one * 2.0 ** exponents[:, None].double()).float().flatten()
    x = torch.cat(
        [x[x.abs() >= 2.0**-126], torch.tensor([0.0, -0.0, math.inf, -math.inf])]
    )
    bits = random_bits(x.shape, seed) & 0x7FFFFFFF
    got = quantize(x, format, rounding="stochastic", seed=seed)
    assert_rounded(
        got,
        with_gfloat(x, format, RoundMode.Stochastic, "saturate", 2**31 - 1 - bits),
        x,
    )


@parametrize("rounding", ROUNDINGS)
@parametrize("format", ROWS)
def test_flush_denormal_loses_nothing(format, rounding):
    seed = 5 if rounding == "stochastic" else None
    for x in (all_patterns(torch.bfloat16), random_patterns(20_003, 5)):
        want = quantize(x, format, rounding=rounding, seed=seed)
        with flush_denormal():
            got = quantize(x, format, rounding=rounding, seed=seed)
        assert_rounded(got, want, x)


@parametrize("name", "e4m3 e5m2 e2m1 bf16 fp16".split())
def test_float64_is_rounded_once(name):
    # Just beside the middle of two neighbours: float32 in between would land on the tie.
    format = FORMATS[name]
    low = quantize(torch.rand(2000, generator=seeded(6)) + 0.5, format).double()
    exponent = (torch.frexp(low).exponent - 1).clamp(min=format.min_exponent)
    step = 2.0 ** (exponent - format.mantissa_bits).double()
    for nudge, up in ((2.0**-40, 1.0), (-(2.0**-40), 0.0)):
        x = low + step / 2 + step * nudge
        got = quantize(x, format)
        assert got.dtype == torch.float64
        assert_same(got, low + up * step)
    assert quantize(torch.tensor(1.0625 + 1e-12, dtype=torch.float64), "e4m3") == 1.125


@parametrize("mantissa_bits", [0, 1, 7, 21, 22, 23])
@parametrize("exponent_bits", [2, 5, 8])
def test_custom_formats_are_exact(exponent_bits, mantissa_bits):
    bias = 2 ** (exponent_bits - 1)
    largest = (2 - 2.0**-mantissa_bits) * 2.0 ** (2**exponent_bits - 1 - bias)
    bits = {"exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits}
    format = Format(name="custom", **bits, bias=bias, max=largest)
    assert format.max_exponent == bias - 1
    assert format.bits == 1 + exponent_bits + mantissa_bits
    x = random_patterns(1500, 8)
    x = torch.cat([x, normal(500, seed=8)])
    x = x[x.isfinite()]
    want = torch.tensor(
        [_nearest_by_fractions(v, format) for v in x.tolist()], dtype=torch.float64
    )
    assert_rounded(quantize(x, format), want.float(), x)


def _nearest_by_fractions(value, format):
    """Nearest, ties to even, saturating, in exact rational arithmetic. Steps finer than float32's
    are float32's."""
    exponent = max(math.frexp(value)[1] - 1, format.min_exponent)
    step = Fraction(2) ** max(exponent - format.mantissa_bits, -149)
    rounded = float(
        min(round(abs(Fraction(value)) / step) * step, Fraction(format.max))
    )
    return math.copysign(rounded, value)


def test_the_seed_decides():
    x = normal(1000, seed=11)

    def sr(seed):
        return quantize(x, "e4m3", rounding="stochastic", seed=seed)

    assert_same(sr(7), sr(7))
    assert_same(sr(7), sr(torch.tensor(7)))
    assert_same(sr((7, 1, 2)), sr((7, torch.tensor(1), 2)))
    for other in (8, (7, 0), -7, 7 + 2**32):
        assert not torch.equal(sr(7), sr(other))


def layouts():
    x = normal(4, 6, 5, 7, seed=13) * 100
    return {
        "contiguous": x,
        "channels_last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(1, 3),
        "strided": x[:, ::2, :, 1:],
        "expanded": x[:1].expand(3, -1, -1, -1),
        "empty": x[:0],
        "scalar": x[0, 0, 0, 0],
        "bfloat16": x.bfloat16().to(memory_format=torch.channels_last),
        "float64": x.double().transpose(0, 1),
    }


@parametrize("chunk", [1 << 17, 16])
@parametrize("rounding", ROUNDINGS)
@parametrize("layout", layouts())
def test_layouts(layout, rounding, chunk, monkeypatch):
    x = layouts()[layout]
    options = {
        "rounding": rounding,
        "seed": (1, 2) if rounding == "stochastic" else None,
    }
    before = x.clone()
    for scale in (None, 0.5, torch.tensor(3.0)):
        want = quantize(x.contiguous().view(-1), "e4m3", scale=scale, **options).view(
            x.shape
        )
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["fp8.formats.quantize"], "CHUNK", chunk)
            got = quantize(x, "e4m3", scale=scale, **options)
        assert_same(got, want)
        assert got.dtype == x.dtype
        assert got.stride() == torch.empty_like(x).stride()
    assert_same(x, before)


def test_scale_is_the_size_of_one_unit():
    x = normal(8, 16, seed=14)
    rows = x.abs().amax(1, keepdim=True) / 448
    assert_same(quantize(x, "e4m3", scale=rows), quantize(x / rows, "e4m3") * rows)
    assert_same(quantize(x, "e4m3", scale=0.25), quantize(x * 4, "e4m3") / 4)
    half = x.bfloat16()
    want = (quantize(half.float() / 0.3, "e4m3") * torch.tensor(0.3)).bfloat16()
    assert_same(quantize(half, "e4m3", scale=0.3), want)


@parametrize(
    "arguments, error, message",
    [
        ({"x": torch.ones(2).int()}, TypeError, "cannot quantize torch.int32; allowed"),
        ({"x": [1.0, 2.0]}, TypeError, "cannot quantize a list; give a tensor"),
        (
            {"x": torch.eye(3).to_sparse()},
            TypeError,
            r"layout torch.sparse_coo; give x.to_dense",
        ),
        ({"x": NESTED}, NotImplementedError, "nested tensor cannot be quantized"),
        ({"format": "fp7"}, ValueError, "unknown format 'fp7'"),
        (
            {"rounding": "up"},
            ValueError,
            "unknown rounding 'up'; choose one of 'nearest'",
        ),
        (
            {"overflow": "wrap"},
            ValueError,
            "unknown overflow 'wrap'; choose one of 'saturate'",
        ),
        (
            {"format": "e2m1", "overflow": "nonfinite"},
            ValueError,
            "'e2m1' has neither Inf nor",
        ),
        *(
            ({"scale": bad}, ValueError, f"scale is {bad}, not positive")
            for bad in BAD_SCALES
        ),
        *(
            (
                {"scale": torch.full((1, 2), bad)},
                ValueError,
                f"scale has {bad}, not positive",
            )
            for bad in BAD_SCALES
        ),
        ({"scale": "1"}, TypeError, "scale is a str; give a number or a tensor"),
        ({"scale": torch.ones(3, 1)}, ValueError, r"\(3, 1\) does not broadcast"),
        ({"seed": 1}, ValueError, "rounding='nearest' takes no seed"),
        ({"rounding": "stochastic", "seed": 1.5}, TypeError, "a seed is an int"),
        ({"rounding": "stochastic", "seed": 2**63}, ValueError, "64 bits"),
        ({"rounding": "stochastic", "seed": torch.ones(2)}, TypeError, "0-dim int64"),
        ({"rounding": "stochastic", "random_bits": 32}, ValueError, "1 to 31, got 32"),
    ],
)
def test_errors_say_what_is_allowed(arguments, error, message):
    with refuses(message, error):
        quantize(**{"x": torch.ones(1, 2), "format": "e4m3", **arguments})


@parametrize("count", [1, 2, 4, 8])
@parametrize("format", ["e2m1", "e4m3"])
def test_few_random_bits(format, count):
    """``cvt.rs`` of Blackwell takes 8 (NVIDIA/TransformerEngine, pull request 3281). Over all of
    them: the chance of rounding up is a multiple of 1/256, off by at most half of that, where
    truncation of the share would be off by one."""
    shares = torch.arange(4096, dtype=torch.float64) / 4096
    x = (1 + shares * 2.0 ** -FORMATS[format].mantissa_bits).float()
    grid = operand_grid(FORMATS[format], "saturate", x.dtype, False, "stochastic")
    ups, patterns = torch.zeros(len(x), dtype=torch.float64), 2**count
    for pattern in range(patterns):
        bits = torch.full(x.shape, pattern << (31 - count), dtype=torch.int32)
        ups += round_to_grid(x, grid, fewer_bits(bits, count)) > 1
    assert ((ups / patterns - shares).abs() <= 0.5 / patterns).all()
    drawn = quantize(x, format, rounding="stochastic", seed=1, random_bits=count)
    sure = (ups == 0) | (ups == patterns)
    assert_same(drawn[sure] > 1, ups[sure] > 0)
