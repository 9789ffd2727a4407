"""Complex and float64 parameters: stepped as by torch, to the bit, beside others and at levels."""

import math
from copy import deepcopy

import torch
from torch import nn

import fp8
from fp8.optim import Adam, AdamW
from tests.shared import (
    assert_same,
    by_path,
    linears,
    normal,
    pairs,
    parametrize,
    refuses,
    same,
)

PAIRS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]
WIDE = (torch.float64, torch.complex64, torch.complex128)
SETTINGS = [
    {},
    {"weight_decay": 0.1, "betas": (0.7, 0.95), "eps": 1e-3},
    {"weight_decay": 0.1, "maximize": True, "lr": torch.tensor(0.01)},
]


def parameters(*dtypes):
    """A large one, a small one, one with other strides, and a scalar of each dtype."""
    values = []
    for seed, dtype in enumerate(dtypes):
        large = normal(80, 60, seed=seed, dtype=dtype)
        values += [large, large[0].clone(), large[:8].t(), large[0, 0].clone()]
    return list(map(nn.Parameter, values))


def steps(optimizer, numbers):
    for number in numbers:
        given = [p for group in optimizer.param_groups for p in group["params"]]
        for i, p in enumerate(given):
            grad = normal(*p.shape, seed=number * 100 + i, dtype=p.dtype)
            p.grad = None if (i + number) % 5 == 3 else 10.0**-number * grad
        optimizer.step()


@parametrize("settings", SETTINGS, ids=["defaults", "others", "maximize"])
@parametrize("ours, theirs", PAIRS)
@parametrize("dtype", WIDE)
def test_a_step_is_that_of_torch(dtype, ours, theirs, settings):
    a, b = parameters(dtype), parameters(dtype)
    left, right = ours(a, **settings), theirs(b, **settings)
    steps(left, range(5))
    steps(right, range(5))
    assert same(a, b)
    for x, y in pairs(a, b):
        assert_same(left.state[x], right.state[y])


@parametrize("ours, theirs", PAIRS)
def test_beside_others_in_a_group(ours, theirs):
    """Each parameter is stepped as if the others were not there; their order does not matter."""
    dtypes = [WIDE[1], torch.float32, WIDE[0], torch.bfloat16, WIDE[2]]
    mixed, alone = parameters(*dtypes), parameters(*dtypes)
    optimizer = ours([{"params": mixed[::2]}, {"params": mixed[1::2], "lr": 0.01}])
    by_torch = theirs([{"params": alone[::2]}, {"params": alone[1::2], "lr": 0.01}])
    steps(optimizer, range(4))
    steps(by_torch, range(4))
    wide = [i for i, p in enumerate(mixed) if p.dtype in WIDE]
    assert same([mixed[i] for i in wide], [alone[i] for i in wide])
    narrow = [p for p in mixed if p.dtype not in WIDE]
    kept = {k for p in narrow for k in optimizer.state[p]}
    assert kept >= {"exp_avg_values", "exp_avg"}
    assert "exp_avg_values" in optimizer.state[mixed[4]]  # the large one in float32


@parametrize("bad", [math.inf, math.nan, complex(0, math.inf)])
def test_one_bad_gradient_stops_all(bad):
    """And none that is finite in its own dtype alone."""
    params = parameters(torch.complex64, torch.float64, torch.float32)
    optimizer = AdamW(params, compile=bad is math.inf)
    for p in params:
        p.grad = torch.ones_like(p)
    params[4].grad *= 1e300
    optimizer.step()
    before, state = deepcopy((params, optimizer.state_dict()["state"]))
    params[1].grad[1] = bad
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert optimizer.state_dict()["param_groups"][0]["skipped_steps"] == 1
    assert same(params, before)
    assert_same(optimizer.state_dict()["state"], state)
    params[1].grad[1] = 0
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert not same(params, before)


def test_states_of_other_dtypes_are_converted_or_refused():
    """The moments of a model that was in another dtype; never a complex number to a real one."""
    narrow, wide = (
        nn.Parameter(torch.ones(80, 60, dtype=d)) for d in (torch.float32, WIDE[0])
    )
    low, high = AdamW([narrow]), AdamW([wide])
    steps(low, range(1))
    high.load_state_dict(low.state_dict())
    (entry,) = high.state_dict()["state"].values()
    assert entry["exp_avg"].dtype == torch.float64
    stored = low.state[narrow]
    decoded = stored["exp_avg_values"].double() * stored["exp_avg_scale"].double()
    assert_same(entry["exp_avg"], decoded)
    low.load_state_dict(high.state_dict())
    values = (s["exp_avg_values"].float() for s in (low.state[narrow], stored))
    assert_same(*values)
    other = AdamW([nn.Parameter(torch.ones(80, 60, dtype=torch.complex64))])
    stepped = deepcopy(other)
    steps(stepped, range(1))
    for optimizer, state in ((other, high), (high, stepped)):
        with refuses(r"exp_avg is torch\.\w+, its parameter torch\.\w+"):
            optimizer.load_state_dict(state.state_dict())


@parametrize("level", fp8.LEVELS)
def test_no_level_stores_them(level):
    """They keep their values and moments, and go on as by torch; the report says so."""
    model = linears(16, 16)
    model.spectrum = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
    models = model, deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters()) for m in models)
    steps(optimizer, range(1))
    fp8.initialize(model, optimizer, level, recipe=None)
    steps(optimizer, range(1, 3))
    steps(other, range(3))
    assert_same(model.spectrum, other.param_groups[0]["params"][0])
    row = by_path(fp8.report(model))["spectrum"]
    assert row.left_alone
    assert "complex64: no level stores it" in row.why
