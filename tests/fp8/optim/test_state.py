"""States of `fp8.optim` saved and loaded: exactly in the same encoding, rounded once in another."""

import copy
import math

import torch
from torch import nn

from fp8.optim import AdamW
from fp8.optim.encodings import ENCODINGS, MOMENTS, Encoded, decode, write, zeros
from fp8.recipes.scaling import scale_of_number
from tests.shared import (
    assert_close,
    assert_same,
    normal,
    parametrize,
    refuses,
    saved,
    seeded,
)

SHAPES = ((64, 96), (4097,), (5,))
FLOAT32 = {"first_moment": "float32", "second_moment": "float32", "min_size": 0}


def parameters(dtype=torch.float32):
    return [nn.Parameter(normal(*shape, dtype=dtype)) for shape in SHAPES]


def steps(optimizer, start, count):
    for step in range(start, start + count):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = normal(*p.shape, dtype=p.dtype, seed=step)
        optimizer.step()


def run(cls, count=2, dtype=torch.float32, make=parameters, **settings):
    params = make(dtype)
    optimizer = cls(params, **settings)
    steps(optimizer, 0, count)
    return params, optimizer


ALL = [
    {},
    {"first_moment": "e4m3_block", "second_moment": "e5m3_block"},
    {"first_moment": "float16", "second_moment": "float16", "min_size": 0},
    {"first_moment": "bfloat16", "second_moment": "bfloat16", "min_size": 0},
    FLOAT32,
]


def test_a_state_of_torch_continues_and_goes_back():
    """With float32 states nothing is rounded on the way there, nor on the way back."""
    theirs, ours = torch.optim.AdamW, AdamW
    params, first = run(theirs, 3, weight_decay=0.1)
    plain, _ = run(theirs, 9, weight_decay=0.1)
    second = ours(params, weight_decay=0.3, **FLOAT32)
    second.load_state_dict(saved(first.state_dict()))
    assert second.param_groups[0]["weight_decay"] == 0.1
    steps(second, 3, 3)
    third = theirs(params)
    third.load_state_dict(saved(second.state_dict()))
    steps(third, 6, 3)
    assert_close(params, plain, rtol=1e-5, atol=1e-6)


@parametrize("kind", ALL)
def test_into_another_encoding_and_back(kind):
    """float32 holds every encoded number, so that the way there and back changes no bit."""
    params, first = run(AdamW, **kind)
    wide, back = AdamW(params, **FLOAT32), AdamW(params, **kind)
    wide.load_state_dict(first.state_dict())
    back.load_state_dict(wide.state_dict())
    for p in params:
        after, before = back.state[p], first.state[p]
        for key, value in before.items():
            scaled = f"{key.removesuffix('values')}scale" in before
            if not key.endswith(("scale", "amax")) and not scaled:
                assert_same(after[key], value)
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(numbers(after, name), numbers(before, name))


def numbers(state, name):
    if name in state:
        return state[name].flatten().float()
    values, scale = state[name + "_values"].flatten(), state[name + "_scale"]
    return decode(Encoded(values, scale))


def test_torch_does_not_take_what_it_cannot_read():
    """Values without their scale under torch's name would be read as if they were the moments."""
    params, first = run(AdamW)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(first.state_dict())
    with refuses("exp_avg", KeyError):
        theirs.step()


def test_masters_come_and_go():
    """One that is not in the file begins as the weights; one that is not kept goes to them."""
    params, first = run(AdamW, dtype=torch.bfloat16, master_weights="float32")
    master = first.state[params[0]]["master"].clone()
    other = [nn.Parameter(p.detach().float()) for p in params]
    AdamW(other).load_state_dict(first.state_dict())
    assert_same(other[0], master)
    plain = AdamW(params)
    plain.load_state_dict(first.state_dict())
    assert_same(params[0], master.to(torch.bfloat16))
    again = AdamW(params, master_weights="float32")
    again.load_state_dict(plain.state_dict())
    assert_same(again.state[params[0]]["master"], params[0].float())


def of_another_kind(kind, **settings):
    return lambda: run(kind, **settings)[1].state_dict()


def damaged(change):
    """A state in which something is changed in place: change(state, its first parameter's)."""

    def saved():
        state = run(AdamW)[1].state_dict()
        change(state, state["state"][0])
        return state

    return saved


def without(name):
    return damaged(lambda state, one: one.pop(name))


def filled(name, value):
    def fill(state, one):
        one[name] = torch.full_like(one[name].float(), value).to(one[name].dtype)

    return damaged(fill)


@parametrize(
    "saved, message",
    [
        (filled("step", -3.0), "step must be finite and not negative, got -3.0"),
        (filled("step", math.nan), "step must be finite and not negative, got nan"),
        (
            filled("exp_avg_values", math.nan),
            "exp_avg must be finite, got nan in 6144 of 6144",
        ),
        (
            filled("exp_avg_sq_values", math.nan),
            "exp_avg_sq must be finite and not .*, got nan",
        ),
        (
            filled("exp_avg_sq_values", -1.0),
            "exp_avg_sq must be finite and not negative, got -",
        ),
        (filled("exp_avg_scale", math.inf), "exp_avg_scale must be finite, got inf"),
        (without("exp_avg_scale"), "has no exp_avg_scale"),
        (without("exp_avg_sq_values"), "has no exp_avg_sq: "),
        (without("step"), "has no step: it is that of another optimizer"),
        (
            damaged(lambda state, one: state["param_groups"][0].pop("betas")),
            "a group of the state has no betas",
        ),
        (
            damaged(lambda state, one: state["param_groups"][0].update(lr=-1.0)),
            "lr must be finite and not negative, got -1.0",
        ),
        (
            damaged(
                lambda state, one: state["state"].update({0: state["state"][1], 1: one})
            ),
            r"shape \(4097,\), its parameter \(64, 96\): this is the state of an",
        ),
        (
            of_another_kind(torch.optim.SGD, momentum=0.9),
            "momentum_buffer is not part of the",
        ),
        (of_another_kind(torch.optim.AdamW, amsgrad=True), "amsgrad"),
    ],
)
def test_what_does_not_fit_changes_nothing(saved, message):
    _, optimizer = run(AdamW)
    before = copy.deepcopy(optimizer.state_dict())
    with refuses(message):
        optimizer.load_state_dict(saved())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert_same(after["state"][0]["exp_avg_scale"], before["state"][0]["exp_avg_scale"])
    steps(optimizer, 4, 1)


# --- encodings --------------------------------------------------------------------------------


def encoded(x, name, away=False):
    encoding = ENCODINGS[name]
    stored = zeros(len(x), encoding, x.device)
    scale = scale_of_number(float(x.abs().amax()), encoding.format)
    if encoding.scale == "tensor":
        stored.scale.fill_(scale)
    write(x, stored, encoding, 1 / scale, away=away)
    return decode(stored)


def sample(count=1000):
    """24 decades, and zeros."""
    g = seeded(0)
    x = 10 ** (24 * torch.rand(count, generator=g) - 12)
    return torch.where(torch.rand(count, generator=g) < 0.1, 0.0, x)


@parametrize("name", MOMENTS["second_moment"])
def test_second_moments_are_zero_only_where_they_were(name):
    """And nowhere smaller than half a unit in the last place below themselves."""
    x = sample()
    y = encoded(x, name, away=True)
    assert_same(y == 0, x == 0)
    assert (y >= x * (1 - 2.0 ** -(ENCODINGS[name].format.mantissa_bits + 1))).all()


@parametrize("name", MOMENTS["first_moment"])
def test_first_moments_are_no_larger_than_half_a_unit_above_themselves(name):
    x = sample() * torch.where(torch.arange(1000) % 2 == 0, 1, -1)
    y = encoded(x, name)
    assert (
        y.abs() <= x.abs() * (1 + 2.0 ** -(ENCODINGS[name].format.mantissa_bits + 1))
    ).all()
    assert (y * x >= 0).all()


def test_every_code_of_e5m3_is_its_own_number():
    """Those below the smallest normal number are not used."""
    codes = torch.tensor([0, *range(8, 256)], dtype=torch.uint8)
    values = decode(Encoded(codes))
    exponents, mantissas = codes.int() // 8, codes.int() % 8
    exact = (1 + mantissas / 8) * 2.0 ** (exponents - 16)
    assert_same(values, torch.where(codes == 0, 0, exact))
    assert_same(encoded(values, "e5m3_block", away=True), blockwise(values))


def blockwise(values):
    """What a block keeps of numbers that fill the range of the largest: those within 2**-31."""
    rows = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 128)
    scale = 2.0 ** (rows.amax(1, keepdim=True) / 61440).log2().ceil()
    floor = torch.where(rows > 0, rows.clamp(min=2.0**-15 * scale), 0.0)
    return floor.flatten()[: len(values)]


def test_e4m3_compiled_is_e4m3():
    """Every finite code is read, and every finite bfloat16 written, as torch's casts do; what is
    below the smallest normal number, toward zero; what is beyond the largest is the largest."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    stored = Encoded(codes.view(torch.float8_e4m3fn))
    read = torch.compile(decode, fullgraph=True)(stored)
    # -0 too
    assert_same(read.view(torch.int32), decode(stored).view(torch.int32))
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = patterns.view(torch.bfloat16).float()
    others = torch.tensor([2**-6 - 2**-30, 464.0, -464.0, 448.1])
    x = torch.cat([x[x.isfinite()], others])
    expected, found = (zeros(len(x), ENCODINGS["e4m3"], x.device) for _ in range(2))
    write(x, expected, ENCODINGS["e4m3"], 1.0)
    torch.compile(write, fullgraph=True)(x, found, ENCODINGS["e4m3"], 1.0)
    bits = (each.values.view(torch.uint8) for each in (found, expected))
    assert_same(*bits)
