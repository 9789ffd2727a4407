"""Complex and float64 parameters: stepped as by torch, to the bit, beside others and at levels."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8.optim import Adam, AdamW
from tests.fp8.optim.test_state import through_a_file

PAIRS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]
WIDE = (torch.float64, torch.complex64, torch.complex128)
SETTINGS = [
    {},
    {"weight_decay": 0.1, "betas": (0.7, 0.95), "eps": 1e-3},
    {"weight_decay": 0.1, "maximize": True, "lr": torch.tensor(0.01)},
]


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """A large one, a small one, one with other strides, and a scalar of each dtype."""
    values = []
    for seed, dtype in enumerate(dtypes):
        large = randn(80, 60, seed=seed, dtype=dtype)
        values += [large, large[0].clone(), large[:8].t(), large[0, 0].clone()]
    return list(map(nn.Parameter, values))


def steps(optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = 10.0**-number * randn(*p.shape, seed=number * 100 + i, dtype=p.dtype)
            if (i + number) % 5 == 3:
                p.grad = None
        optimizer.step()


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=["defaults", "others", "maximize"])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_a_step_is_that_of_torch(dtype, ours, theirs, settings):
    a, b = parameters(dtype), parameters(dtype)
    left, right = ours(a, **settings), theirs(b, **settings)
    steps(left, range(5))
    steps(right, range(5))
    assert same(a, b)
    for x, y in zip(a, b, strict=True):
        assert left.state[x].keys() == right.state[y].keys()
        for name, value in right.state[y].items():
            assert left.state[x][name].dtype == value.dtype
            assert torch.equal(left.state[x][name], value)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_beside_others_in_a_group(ours, theirs):
    """Each parameter is stepped as if the others were not there; their order does not matter."""
    dtypes = [torch.complex64, torch.float32, torch.float64, torch.bfloat16, torch.complex128]
    mixed, alone = parameters(*dtypes), parameters(*dtypes)
    optimizer = ours([{"params": mixed[::2]}, {"params": mixed[1::2], "lr": 0.01}])
    by_torch = theirs([{"params": alone[::2]}, {"params": alone[1::2], "lr": 0.01}])
    steps(optimizer, range(4))
    steps(by_torch, range(4))
    wide = [i for i, p in enumerate(mixed) if p.dtype in WIDE]
    assert same([mixed[i] for i in wide], [alone[i] for i in wide])
    narrow = [p for p in mixed if p.dtype not in WIDE]
    assert {k for p in narrow for k in optimizer.state[p]} >= {"exp_avg_values", "exp_avg"}
    assert "exp_avg_values" in optimizer.state[mixed[4]]  # the large one in float32
    found = fp8.optim.state_bytes(optimizer)
    size = sum(p.nbytes for p in mixed)
    moments = sum(p.nbytes for p in mixed if p.dtype in WIDE)
    assert found["weight"] == size
    assert moments < found["first_moment"] < moments + sum(p.numel() * 4 for p in narrow)


@pytest.mark.parametrize("bad", [math.inf, math.nan, complex(0, math.inf)])
@pytest.mark.parametrize("where", range(2))
def test_one_bad_gradient_stops_all(bad, where):
    """And none that is finite in its own dtype alone."""
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.complex64,) * 2]
    params.append(nn.Parameter(torch.ones(3, dtype=torch.float64)))
    params.append(nn.Parameter(torch.ones(5000)))
    optimizer = AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    params[2].grad *= 1e300
    optimizer.step()
    assert optimizer.skipped_steps == 0
    before, state = copy.deepcopy(params), copy.deepcopy(optimizer.state_dict()["state"])
    params[where].grad[1] = bad
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert same(params, before)
    after = optimizer.state_dict()["state"]
    for i, entry in state.items():
        assert all(torch.equal(after[i][name], value) for name, value in entry.items())


def test_a_state_resumes_and_goes_to_torch_and_back():
    dtypes = (torch.complex64, torch.float64)
    whole, params = parameters(*dtypes), parameters(*dtypes)
    first = AdamW(whole)
    steps(first, range(6))
    ours = AdamW(params)
    steps(ours, range(2))
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(through_a_file(ours.state_dict()))
    steps(theirs, range(2, 4))
    again = AdamW(params)
    again.load_state_dict(through_a_file(theirs.state_dict()))
    steps(copy.deepcopy(again), range(4, 6))
    steps(again, range(4, 6))
    assert same(params, whole)


def test_states_of_other_dtypes_are_converted_or_refused():
    """The moments of a model that was in another dtype; never a complex number to a real one."""
    narrow, wide = (nn.Parameter(torch.ones(80, 60, dtype=d)) for d in (torch.float32, WIDE[0]))
    low, high = AdamW([narrow]), AdamW([wide])
    steps(low, range(1))
    high.load_state_dict(low.state_dict())
    (entry,) = high.state_dict()["state"].values()
    assert entry["exp_avg"].dtype == torch.float64
    stored = low.state[narrow]
    decoded = stored["exp_avg_values"].double() * stored["exp_avg_scale"].double()
    assert torch.equal(entry["exp_avg"], decoded)
    low.load_state_dict(high.state_dict())
    assert torch.equal(
        low.state[narrow]["exp_avg_values"].float(), stored["exp_avg_values"].float()
    )
    other = AdamW([nn.Parameter(torch.ones(80, 60, dtype=torch.complex64))])
    for optimizer, state in ((other, high), (high, _stepped(other))):
        with pytest.raises(ValueError, match=r"exp_avg is torch\.\w+, its parameter torch\.\w+"):
            optimizer.load_state_dict(state.state_dict())


def _stepped(optimizer: AdamW) -> AdamW:
    optimizer = copy.deepcopy(optimizer)
    steps(optimizer, range(1))
    return optimizer


class Spectral(nn.Module):
    """A layer of a Fourier neural operator (arXiv:2010.08895), with a scale in float64."""

    def __init__(self, width: int = 16, modes: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.weight = nn.Parameter(
            randn(width, width, modes, seed=0, dtype=torch.complex64) / width
        )
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        lowest = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("bik,iok->bok", lowest, self.weight)
        y = torch.fft.irfft(mixed, n=x.shape[-1]) + self.inner(x.mT).mT
        return nn.functional.gelu(y) * self.scale.float()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, AdamW])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_neural_operator_at_a_level(level, kind):
    torch.manual_seed(0)
    model = nn.Sequential(Spectral(), Spectral())
    x, target = torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    optimizer = kind(model.parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    step()  # a training under way
    before = copy.deepcopy([optimizer.state[model[0].weight], optimizer.state[model[0].scale]])
    fp8.initialize(model, optimizer, level, recipe="tensor")
    for entry, name in zip(before, ("weight", "scale"), strict=True):
        now = optimizer.state[getattr(model[0], name)]
        assert all(torch.equal(now[key], value) for key, value in entry.items())
    assert isinstance(model[0].inner.weight, fp8.ScaledTensor)
    losses = [step() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    rows = {row.path: row for row in fp8.report(model)}
    for name, dtype in (("1.weight", "complex64"), ("0.scale", "float64")):
        assert rows[name].left_alone
        assert f"{dtype}: no level stores it" in rows[name].why
        module, _, attribute = name.partition(".")
        moment = optimizer.state[getattr(model[int(module)], attribute)]["exp_avg"]
        assert moment.dtype == getattr(torch, dtype)
    state = copy.deepcopy(optimizer.state_dict())
    weights = through_a_file(model.state_dict())
    want = [step() for _ in range(2)]
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert [step() for _ in range(2)] == want


def test_no_row_without_a_level_or_such_a_parameter():
    assert not [row for row in fp8.report(Spectral()) if row.path == "weight"]
    model = nn.Sequential(nn.Linear(8, 8))
    fp8.initialize(model)
    assert [row.path for row in fp8.report(model)] == ["0"]
