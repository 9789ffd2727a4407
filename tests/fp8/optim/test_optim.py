"""`fp8.optim` against torch's optimizers, with what is done with optimizers."""

import functools
import inspect

import torch
from torch import nn

import fp8
import fp8.optim.step
from fp8.optim import Adam, AdamW, state_bytes
from tests.shared import (
    assert_close,
    assert_same,
    normal,
    pairs,
    parametrize,
    proves,
    refuses,
)

from . import test_state
from .test_state import steps

FLOAT32 = {"first_moment": "float32", "second_moment": "float32"}
BLOCKS = {"first_moment": "e4m3_block", "second_moment": "e5m3_block"}
LOW = [{}, BLOCKS, {"first_moment": "bfloat16", "second_moment": "bfloat16"}]


def parameters(dtype=torch.float32, seed=0):
    """A large one, a large one that is transposed, one that no block divides, and small ones."""
    shapes = [(64, 96), (96, 64), (4097,), (5, 7), (3,), ()]
    tensors = [normal(*shape, dtype=dtype, seed=seed) for shape in shapes]
    tensors[1] = tensors[1].t()
    return [nn.Parameter(x) for x in tensors]


run = functools.partial(test_state.run, count=5, make=parameters)


@torch.no_grad()
def distance(ours, theirs):
    """Of the changes since the start, relative to those of theirs."""
    start = parameters(theirs[0].dtype)
    gap = torch.stack([(a - b).norm() for a, b in pairs(ours, theirs)]).norm()
    way = torch.stack([(a - b).norm() for a, b in pairs(start, theirs)]).norm()
    return float(gap / way)


SETTINGS = [
    {},
    {"lr": 1e-2, "betas": (0.5, 0.7), "eps": 1e-3},
    {"weight_decay": 0.5},
    {"weight_decay": 0.5, "maximize": True},
    {"lr": torch.tensor(1e-2)},
]


@parametrize(
    "name, settings", [("Adam", SETTINGS[3]), *(("AdamW", s) for s in SETTINGS)]
)
def test_with_float32_states_it_is_torchs(name, settings):
    """To rounding: torch divides in another order. Decay of Adam is L2, that of AdamW decoupled."""
    ours, _ = run(getattr(fp8.optim, name), **FLOAT32, **settings)
    theirs, _ = run(getattr(torch.optim, name), **settings)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@proves("the field", "optimizer states in low precision")
@parametrize("formats", LOW)
def test_low_precision_states_stay_near(formats):
    """Half a unit of 3 mantissa bits is 6 %, which is what moments of independent errors are off
    by; a step by as much, and the sum of 30 by less."""
    settings = {"weight_decay": 0.1, "count": 30}
    ours, _ = run(AdamW, min_size=0, **formats, **settings)
    theirs, _ = run(torch.optim.AdamW, **settings)
    assert distance(ours, theirs) < 0.12


@proves("MS-AMP", "FP16 AMP")
def test_grad_scaler():
    """It unscales, skips what is not finite by itself, and so counts there and not here."""
    params = parameters()
    optimizer, scaler = AdamW(params), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain, _ = run(AdamW, count=1)
    for p in params:
        p.grad = normal(*p.shape) * 2.0**10
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    for scale in (2.0**10, 2.0**9):
        scaler.step(optimizer)
        scaler.update()
        assert_same(params, plain)
        assert scaler.get_scale() == scale
        params[0].grad[0] = torch.inf


@parametrize(
    "dtype, settings",
    [(torch.float32, BLOCKS), (torch.bfloat16, {"stochastic_weights": True})],
)
def test_compiled_and_eager_keep_the_same_bits(dtype, settings, monkeypatch):
    """States, in several pieces and with a rest that is not compiled; weights to a multiplication
    fused with an addition, which is at most a unit in the last place of 16 bits."""
    monkeypatch.setattr(fp8.optim.step, "BLOCKS", 1 << 11)
    weights, states = [], []
    for compile in (False, True):
        params = parameters(dtype)[2:]
        optimizer = AdamW(params, compile=compile, **settings)
        steps(optimizer, 0, 3)
        weights.append(params)
        states.append(optimizer.state_dict()["state"])
    assert_same(*states)
    rtol, atol = (1e-6, 1e-7) if dtype == torch.float32 else (2**-7, 0)
    assert_close(*weights, rtol=rtol, atol=atol)


# --- weights ----------------------------------------------------------------------------------


@proves("the field", "master weights")
def test_float32_master_weights():
    """The weights are those of a float32 run on the same gradients, rounded."""
    dtype = torch.bfloat16
    ours, optimizer = run(AdamW, dtype=dtype, master_weights="float32", **FLOAT32)
    exact = [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    plain = AdamW(exact, **FLOAT32)
    for step in range(5):
        for p in exact:
            p.grad = normal(*p.shape, seed=step).to(dtype).float()
        plain.step()
    for a, b in pairs(ours, exact):
        assert_same(a, b.to(dtype))
    assert state_bytes(optimizer)["master"] == 4 * sum(p.numel() for p in ours)


@proves("the field", "master weights")
def test_float16_master_weights():
    """In units of a scale: weights far below the range of float16 keep its precision, 2**-11 of a
    magnitude of up to 5e-9, and so steps of a quarter of that."""
    weight = nn.Parameter((1e-9 * torch.randn(128, 64)).to(torch.bfloat16))
    before = weight.detach().double()
    optimizer = AdamW(
        [weight], lr=1e-11, master_weights="float16", weight_decay=0.0, **FLOAT32
    )
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    state = optimizer.state[weight]
    assert state["master_values"].dtype == torch.float16
    master = state["master_values"].double() * state["master_scale"].double()
    assert_close(before - master, torch.full_like(before, 1e-9), rtol=0.15, atol=0)
    assert_same(weight.detach(), master.to(torch.bfloat16))


WRITES = {
    "data": lambda p: setattr(p, "data", p.data * 2),
    "data in place": lambda p: p.data.clamp_(-0.5, 0.5),
    "numpy": lambda p: p.detach().view(torch.int16).numpy().fill(16256),
    "rows": lambda p: p.data.copy_(p.data.flip(0).clone()),
    "columns": lambda p: p.data.copy_(p.data.flip(-1).clone()),
    "one element": lambda p: p.data.view(-1)[-1:].add_(8.0),
}


@parametrize("write", WRITES)
def test_masters_follow_what_is_written_past_the_version_of_a_weight(write):
    for shape in [(64, 96), (96, 65), (4097,)]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(shape).bfloat16())
        optimizer = AdamW([weight], lr=1e-3, weight_decay=0.0, master_weights="float32")
        for _ in range(2):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            WRITES[write](weight)
            written = weight.detach().clone()
            optimizer.step()
            assert_same(weight, written)


# --- arguments --------------------------------------------------------------------------------


@parametrize(
    "settings, message",
    [
        ({"amsgrad": True}, "amsgrad=True is not supported"),
        (
            {"first_moment": "fp4"},
            "unknown first_moment 'fp4'; choose one of 'float32', ",
        ),
        ({"second_moment": "e4m3"}, "unknown second_moment 'e4m3'"),
        (
            {"master_weights": "e4m3"},
            "unknown master_weights 'e4m3'; choose one of None",
        ),
        ({"lr": -1.0}, "lr must be finite and not negative, got -1.0"),
        (
            {"betas": (0.9, 1.0)},
            r"betas must be at least 0 and less than 1, got \(0.9, 1.0\)",
        ),
        ({"eps": float("nan")}, "eps must be finite"),
    ],
)
def test_arguments_are_checked(settings, message):
    with refuses(message):
        AdamW(parameters(), **settings)
    if "amsgrad" not in settings:
        optimizer = AdamW(parameters()[:1])
        with refuses(message):
            optimizer.add_param_group({"params": parameters(), **settings})
        assert len(optimizer.param_groups) == 1


def test_types_are_checked():
    with refuses(r"cannot step a parameter of torch\.float8_e5m2", TypeError):
        AdamW([nn.Parameter(torch.zeros(2).to(torch.float8_e5m2))])
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with refuses("dense gradients", RuntimeError):
        AdamW(embedding.parameters()).step()
    for settings, message in (
        ({"betas": 0.9}, "betas are two numbers, got 0.9"),
        ({"betas": (0.9,)}, r"betas are two numbers, got \(0.9,\)"),
        ({"seed": 1.5}, "seed is an int, got 1.5"),
    ):
        with refuses(message, TypeError):
            AdamW(parameters(), **settings)


@parametrize("cls", [Adam, AdamW])
def test_torchs_options_are_taken_where_they_are_off(cls):
    """As code that passes them all on does, by torch's names and in torch's order."""
    theirs = inspect.signature(getattr(torch.optim, cls.__name__)).parameters
    only = inspect.Parameter.KEYWORD_ONLY
    options = {name: p.default for name, p in theirs.items() if p.kind is only}
    options.pop("decoupled_weight_decay", None)
    ours = inspect.signature(cls).parameters
    assert {name: ours[name].default for name in options} == options
    (group,) = cls(parameters(), 0.1, **dict.fromkeys(options, False)).param_groups
    assert group["lr"] == 0.1
    for name in options.keys() - {"maximize"}:
        with refuses(f"{name}=True is not supported in low precision"):
            cls(parameters(), 0.1, **{name: True})
