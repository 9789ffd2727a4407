"""Sums as tensor cores make them, bit for bit against mmasim's models of the instructions."""

import pytest
import torch

from fp8.formats.format import get_format
from fp8.formats.quantize import quantize
from fp8.lab.sums import dot as dot_module
from fp8.lab.sums.dot import dot
from fp8.recipes.tensor_cores import FORMATS, TENSOR_CORES
from tests.shared import parametrize, proves, sampled

nvidia = pytest.importorskip("mmasim.nv_ptx.sim")

K = 128

MAGNITUDES = {
    "normal": lambda shape: torch.randn(shape),
    "subnormal": lambda shape: torch.randn(shape) * 2.0**-8,
    "mixed": lambda shape: (
        torch.randn(shape) * torch.exp2(torch.randint(-14, 8, shape).float())
    ),
    "cancelling": lambda shape: torch.randn(shape).repeat_interleave(2, -1)[
        ..., : shape[-1]
    ],
    "sparse": lambda shape: torch.randn(shape) * (torch.rand(shape) < 0.02),
    "large": lambda shape: torch.randn(shape).relu() * 2.0**15,
    "not finite": lambda shape: torch.where(
        torch.rand(shape) < 0.004,
        torch.tensor([torch.inf, -torch.inf, torch.nan])[torch.randint(3, shape)],
        torch.randn(shape),
    ),
}


def values(kind, shape, format, seed):
    torch.manual_seed(seed)
    x = MAGNITUDES[kind](shape)
    if (
        kind == "cancelling" and seed
    ):  # of opposite signs against the first operand's pairs
        x[:, 1::2] *= -1
    return quantize(x, format, overflow="saturate")


def stored(x, format):
    """The values as mmasim takes them."""
    return x.to(get_format(format).dtype)


def same_bits(got, want):
    return torch.equal(got.view(torch.int32), want.view(torch.int32))


NV = {
    "ada": ("mma", "Ada Lovelace", "m16n8k32.f32.{}.{}.f32"),
    "hopper": ("wgmma", "Hopper", "m64n8k32.f32.{}.{}"),
}
CLASSES = {"mma": nvidia.MMA, "wgmma": nvidia.WGMMA}


def plain_instructions():
    return [
        (chip, a, b, (CLASSES[cls], arch, text.format(a, b)))
        for chip, (cls, arch, text) in NV.items()
        for a in FORMATS
        for b in FORMATS
    ]


def ids(value):
    return str(value[-1] if isinstance(value, tuple) else value)


def check(chip, first, second, op, kind, k, seed=0):
    a, b = (
        values(kind, (op.m, k), first, seed),
        values(kind, (op.n, k), second, seed + 1),
    )
    c = torch.zeros(op.m, op.n)
    left, right = stored(a, first), stored(b, second)
    for start in range(0, k, op.k):
        part = slice(start, start + op.k)
        c = op(left[:, part], right[:, part].T, c)
    lows = get_format(first).min_exponent, get_format(second).min_exponent
    assert same_bits(dot(a, b, lows, TENSOR_CORES[chip]), c)


@sampled(6)
@proves("the field", "sums of tensor cores", how="library")
@parametrize("chip, first, second, made", plain_instructions(), ids=ids)
@parametrize("kind", MAGNITUDES)
def test_bits_of_plain_instructions(chip, first, second, made, kind):
    cls, *arguments = made
    check(chip, first, second, cls(*arguments), kind, K)


@pytest.mark.exhaustive
@parametrize("chip, first, second, made", plain_instructions(), ids=ids)
def test_bits_of_a_million_outputs(chip, first, second, made):
    cls, arch, text = made
    op = cls(arch, text.replace("n8", "n256") if cls is not CLASSES["mma"] else text)
    for seed in range(-(-1_000_000 // (op.m * op.n))):
        kind = list(MAGNITUDES)[seed % len(MAGNITUDES)]
        check(chip, first, second, op, kind, 2 * op.k, 2 * seed)


@parametrize("chip", ["hopper", pytest.param("ada", marks=pytest.mark.exhaustive)])
def test_compiled_sums_are_those_of_eager_mode(chip, monkeypatch):
    """Also where tiles and steps are not full."""
    for kind in ("mixed", "not finite"):
        a, b = (values(kind, (rows, 75), "e4m3", rows) for rows in (140, 270))
        results = []
        for products in (1 << 60, 0):
            monkeypatch.setattr(dot_module, "EAGER", products)
            results.append(dot(a, b, (-6, -6), TENSOR_CORES[chip]))
        assert same_bits(*results)
