"""Sums as tensor cores make them, bit for bit against mmasim's models of the instructions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8.formats.format import get_format
from fp8.formats.quantize import quantize
from fp8.lab.sums import dot as dot_module
from fp8.lab.sums.arithmetic import Matrix
from fp8.lab.sums.dot import dot
from fp8.recipes.tensor_cores import TENSOR_CORES, instruction

nvidia = pytest.importorskip("mmasim.nv_ptx.sim")

K = 128

MAGNITUDES = {
    "normal": lambda shape: torch.randn(shape),
    "subnormal": lambda shape: torch.randn(shape) * 2.0**-8,
    "mixed": lambda shape: torch.randn(shape) * torch.exp2(torch.randint(-14, 8, shape).float()),
    "cancelling": lambda shape: torch.randn(shape).repeat_interleave(2, -1)[..., : shape[-1]],
    "sparse": lambda shape: torch.randn(shape) * (torch.rand(shape) < 0.02),
    "large": lambda shape: torch.randn(shape).relu() * 2.0**15,
    "not finite": lambda shape: torch.where(
        torch.rand(shape) < 0.004,
        torch.tensor([torch.inf, -torch.inf, torch.nan])[torch.randint(3, shape)],
        torch.randn(shape),
    ),
}


def values(kind: str, shape: tuple[int, int], format: str, seed: int) -> Tensor:
    torch.manual_seed(seed)
    x = MAGNITUDES[kind](shape)
    if kind == "cancelling" and seed:  # of opposite signs against the first operand's pairs
        x[:, 1::2] *= -1
    if get_format(format).nonfinite is None:
        x = x.nan_to_num(0.0, 0.0, 0.0)
    return quantize(x, format, overflow="saturate")


def stored(x: Tensor, format: str) -> Tensor:
    """The values as mmasim takes them: a torch dtype, or codes in a byte for FP6 and FP4."""
    dtype = get_format(format).dtype
    if dtype is not None and dtype.itemsize == 1 and format != "e2m1":
        return x.to(dtype)
    known = get_format(format)
    magnitudes = x.abs()
    exponent = torch.floor(torch.log2(magnitudes.clamp_min(known.min_normal)))
    field = (exponent - known.min_exponent + 1).where(magnitudes >= known.min_normal, 0.0)
    fraction = magnitudes / torch.exp2(exponent) - (field > 0).float()
    code = field * 2**known.mantissa_bits + fraction * 2**known.mantissa_bits
    bits = 1 + known.exponent_bits + known.mantissa_bits
    code = code.to(torch.uint8) | (x.signbit().to(torch.uint8) << (bits - 1))
    return code << (6 - bits)


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.int32), want.view(torch.int32))


NV = {
    "ada": ("mma", "Ada Lovelace", "m16n8k32.f32.{}.{}.f32"),
    "hopper": ("wgmma", "Hopper", "m64n8k32.f32.{}.{}"),
    "blackwell": ("tcgen05", "Blackwell", "m64n8k32.kind::f8f6f4.f32.{}.{}"),
}
CLASSES = {"mma": nvidia.MMA, "wgmma": nvidia.WGMMA, "tcgen05": nvidia.TCGen05MMA}


def plain_instructions() -> list[tuple[str, str, str, Any]]:
    found = []
    for chip, (cls, arch, text) in NV.items():
        for row in TENSOR_CORES[chip]:
            if not row.scales:
                found += [
                    (chip, a, b, (CLASSES[cls], arch, text.format(a, b)))
                    for a in row.formats
                    for b in row.formats
                ]
    return found


def ids(value: Any) -> str:
    return str(value[-1] if isinstance(value, tuple) else value)


def check(chip: str, first: str, second: str, op: Any, kind: str, k: int, seed: int = 0) -> None:
    a, b = values(kind, (op.m, k), first, seed), values(kind, (op.n, k), second, seed + 1)
    c = torch.zeros(op.m, op.n)
    left, right = stored(a, first), stored(b, second)
    for start in range(0, k, op.k):
        part = slice(start, start + op.k)
        c = op(left[:, part], right[:, part].T, c)
    how = instruction(chip, (first, second))
    low = [get_format(name).min_exponent for name in (first, second)]
    assert same_bits(dot(Matrix(a, low[0]), Matrix(b, low[1]), how), c)


@pytest.mark.sampled(6)
@pytest.mark.proves("the field", "sums of tensor cores", how="library")
@pytest.mark.parametrize(("chip", "first", "second", "made"), plain_instructions(), ids=ids)
@pytest.mark.parametrize("kind", MAGNITUDES)
def test_bits_of_plain_instructions(chip, first, second, made, kind):
    cls, *arguments = made
    check(chip, first, second, cls(*arguments), kind, K)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("chip", "first", "second", "made"), plain_instructions(), ids=ids)
def test_bits_of_a_million_outputs(chip, first, second, made):
    cls, arch, text = made
    op = cls(arch, text.replace("n8", "n256") if cls is not CLASSES["mma"] else text)
    for seed in range(-(-1_000_000 // (op.m * op.n))):
        kind = list(MAGNITUDES)[seed % len(MAGNITUDES)]
        check(chip, first, second, op, kind, 2 * op.k, 2 * seed)


def scaled_instructions() -> list[tuple[str, str, int, str, str]]:
    """(format of a, of b, elements of a scale, its format, instruction) of Blackwell."""
    narrow = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
    found = [
        (a, b, 32, "e8m0", f"m128n8k32.kind::mxf8f6f4.block32.f32.{a}.{b}.ue8m0")
        for a in narrow
        for b in narrow
        if (a, b) != ("e2m1", "e2m1")  # ours is the instruction for FP4
    ]
    four = ("e2m1", "e2m1")
    found += [
        (*four, along, name, f"m128n8k64.kind::{kind}.block{along}.f32.e2m1.e2m1.u{name}")
        for kind, along, name in (
            ("mxf4", 32, "e8m0"),
            ("mxf4nvf4", 32, "e8m0"),
            ("mxf4nvf4", 16, "e8m0"),
            ("mxf4nvf4", 16, "e4m3"),
        )
    ]
    return found


SCALES = {
    "near 1": lambda shape: torch.exp2(torch.randint(-3, 4, shape).float()),
    "far": lambda shape: torch.exp2(torch.randint(-60, 40, shape).float()),
    "smallest": lambda shape: torch.full(shape, 2.0**-127),
    "NaN": lambda shape: torch.where(torch.rand(shape) < 0.05, torch.nan, 1.0),
}


def packed(x: Tensor) -> Tensor:
    """Two FP4 codes in a byte, as mmasim unpacks them."""
    codes = stored(x, "e2m1") >> 2
    return codes[:, ::2] << 4 | codes[:, 1::2]


@pytest.mark.sampled(7)
@pytest.mark.proves("the field", "sums of tensor cores", how="library")
@pytest.mark.parametrize(
    ("first", "second", "along", "scale", "name"), scaled_instructions(), ids=ids
)
@pytest.mark.parametrize("size", SCALES)
@pytest.mark.parametrize("kind", ["mixed", pytest.param("sparse", marks=pytest.mark.exhaustive)])
def test_bits_of_block_scaled_instructions(first, second, along, scale, name, size, kind):
    op = nvidia.TCGen05MMABlockScale("Blackwell", name)
    a, b = values(kind, (op.m, K), first, 0), values(kind, (op.n, K), second, 1)
    dtype = torch.float8_e8m0fnu if scale == "e8m0" else torch.float8_e4m3fn
    alpha, beta = (SCALES[size]((rows, K // along)) for rows in (op.m, op.n))
    if scale == "e4m3":
        fractions = torch.rand(alpha.shape) + 1, torch.rand(beta.shape) + 1
        alpha, beta = alpha.clamp(2**-9, 16) * fractions[0], beta.clamp(2**-9, 16) * fractions[1]
    alpha, beta = alpha.to(dtype), beta.to(dtype)
    packs = op.packing == 2
    left, right = (packed(x) if packs else stored(x, f) for x, f in ((a, first), (b, second)))
    c = torch.zeros(op.m, op.n)
    for start in range(0, K, op.k):
        part = slice(start // op.packing, (start + op.k) // op.packing)
        of = slice(start // along, (start + op.k) // along)
        c = op(left[:, part], right[:, part].T, c, alpha[:, of], beta[:, of].T)
    how = instruction("blackwell", (first, second), along, scale)
    low = [get_format(format).min_exponent for format in (first, second)]
    of_scale = -127 if scale == "e8m0" else -6
    left, right = (
        Matrix(x, low, s.float(), along, of_scale)
        for x, low, s in ((a, low[0], alpha), (b, low[1], beta))
    )
    got = dot(left, right, how)
    assert same_bits(got, c)


def test_sums_of_terms_with_the_largest_fractions():
    """The 32 terms of a step, 3.5 * 2**25 each, exceed int32; 16 do not."""
    op = nvidia.TCGen05MMA("Blackwell", "m64n8k32.kind::f8f6f4.f32.e4m3.e4m3")
    a, b = torch.full((op.m, op.k), 1.875), torch.full((op.n, op.k), 1.875)
    want = op(stored(a, "e4m3"), stored(b, "e4m3").T, torch.zeros(op.m, op.n))
    got = dot(Matrix(a, -6), Matrix(b, -6), instruction("blackwell", ("e4m3", "e4m3")))
    assert same_bits(got, want)


@pytest.mark.parametrize(
    ("chip", "row"),
    [
        pytest.param(chip, i, marks=() if chip == "hopper" else pytest.mark.exhaustive)
        for chip, rows in TENSOR_CORES.items()
        for i in range(len(rows))
    ],
)
def test_compiled_sums_are_those_of_eager_mode(chip, row, monkeypatch):
    """Also where tiles and steps are not full."""
    how, name = TENSOR_CORES[chip][row], TENSOR_CORES[chip][row].formats[0]
    low, along = get_format(name).min_exponent, min(how.scales, default=0)
    for kind in ("mixed", "not finite"):
        operands = []
        for seed, rows in enumerate((140, 270)):
            x, scales = values(kind, (rows, 75), name, seed), None
            if along:
                scales = SCALES["near 1"]((rows, -(-75 // along)))
            operands.append(Matrix(x, low, scales, along))
        results = []
        for products in (1 << 60, 0):
            monkeypatch.setattr(dot_module, "EAGER", products)
            results.append(dot(*operands, how))
        assert same_bits(*results)
