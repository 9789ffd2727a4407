"""Models whose calls depend on values: routed experts, loops, skipped layers, caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unit_scaling as uu
from tests.launch import run_ranks
from tests.transforms.gradients import check_slopes, check_true
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.plan.model_plan import ModelPlan
from unit_scaling.transforms.run.replay import PlanMissError

WIDTH = 16


class Experts(nn.Module):
    """A mixture of experts that are modules, called if a token chooses them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(8)
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                total.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
        return (self.out(total + x) * 7).square().mean()


class Stacked(nn.Module):
    """A mixture whose experts are slices of one weight, and calls of the same kind after them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        chosen = shares.argmax(-1)
        total = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            at = (chosen == number).nonzero()[:, 0]
            hidden = torch.tanh(x[at] @ self.weights[number] * 3) * shares[at, number, None]
            total = total.index_add(0, at, hidden)
        mixed = torch.tanh((total * 5 + x) @ self.weights.mean(0))
        return (self.out(mixed) * 7).square().mean()


class Skipping(nn.Module):
    """Residual layers, some of which are skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            if x.detach()[0, number] < 0.5:
                x = x + layer(norm(x)).tanh() * 0.5
        return self.out(x).square().mean() / 512


class Unrolled(nn.Module):
    """A loop over time, of another length for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for time in range(1 + int(x.detach().abs().sum() * 10) % 5):
            state = torch.tanh(self.given(x.roll(time)) + self.kept(state) * 2)
        return self.out(state * 3).square().sum()


class Caching(nn.Module):
    """A table that only the first call computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = (torch.arange(WIDTH, dtype=x.dtype) * 0.1).cos() * 2
        return (self.out(torch.tanh(self.first(x) * self.table) * 3) * 2).square().mean()


class Converted(nn.Module):
    """Converts a layer in every forward pass, and its gradient once it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.first = self.first.to(x.dtype)
        return (self.out(torch.tanh(self.first(x.to(x.dtype)) * 2)) * 3).square().mean()


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x.cosh().square()


class Loop(nn.Module):
    """Products by a parameter, one after the other, all of which are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for time in range(1 + int(x.detach().abs().sum() * 10) % 5):
            states.append(Tanh.apply(x.roll(time) @ self.weight))
        return torch.stack(states).sum(0)


class Recomputed(nn.Module):
    """A loop in a checkpoint, which detaches what a function of its own saves."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.loop, self.out = nn.Linear(WIDTH, WIDTH), Loop(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        states = checkpoint(self.loop, self.given(x), use_reentrant=False)
        return self.out(states * 3).square().sum()


MODELS = [Converted, Experts, Stacked, Skipping, Unrolled, Caching, Recomputed]


def batches(count: int = 8, tokens: int = 4) -> list[Tensor]:
    """Batches that take many branches of the models above."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, WIDTH, generator=draw, dtype=torch.float64) for _ in range(count)]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("kind", MODELS)
def test_preserve_computes_the_gradients_of_every_branch(kind: type[nn.Module]) -> None:
    plain = made(kind)
    model = unit_scale(copy.deepcopy(plain), init="preserve")
    for x in batches():
        plain.zero_grad()
        model.zero_grad()
        expected, value = plain(x), model(x)
        expected.backward()
        value.backward()
        assert torch.equal(value, expected)
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad, own.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_the_true_ones_times_one_power_of_two_of_each_parameter(
    kind: type[nn.Module],
) -> None:
    model = unit_scale(made(kind))
    seen: dict[str, int] = {}
    for x in batches():
        for name, power in check_true(model, lambda m, x=x: m(x)).items():
            assert seen.setdefault(name, power) == power, name


@pytest.mark.parametrize("kind", MODELS)
def test_the_function_does_not_depend_on_the_branches_before(kind: type[nn.Module]) -> None:
    model = unit_scale(made(kind))
    for x in batches():
        model(x).backward()
    values = [model(x) for x in batches()]
    again = [model(x) for x in reversed(batches())]
    assert torch.equal(torch.stack(values), torch.stack(again[::-1]))


def test_a_call_that_no_recording_sees_is_an_error_by_name() -> None:
    class Odd(nn.Module):
        """Every call takes a branch at another place of the code, and one call more."""

        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            Odd.calls += 1
            for line in range(Odd.calls):
                text = "\n" * (line + 10 * Odd.calls) + "torch.tanh(x)"
                x = eval(compile(text, "branch", "eval"), {"torch": torch, "x": x})
            return self.layer(x)

    model = unit_scale(Odd())
    with pytest.raises(PlanMissError, match="a branch that none of its recorded calls"):
        [model(torch.randn(3, 4)) for _ in range(4)]


def test_varying_modules_are_saved_with_the_plan() -> None:
    model = unit_scale(made(Stacked))
    for x in batches():
        model(x).backward()
    plan = uu.plan(model)
    assert plan.settled.varying == {"": True}
    assert ModelPlan.from_json(plan.to_json()).settled.varying == {"": True}
    again = unit_scale(made(Stacked), plan=plan)
    x = batches()[0]
    torch.testing.assert_close(again(x), model(x))


def test_processes_agree_on_experts_that_only_one_has_used(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("varying_worker.py"), 2, tmp_path / "store")


class Assigned(torch.autograd.Function):
    """Writes into a tensor without autograd's knowledge, as solvers of differential equations do:
    no call shows that the result is computed from the value."""

    @staticmethod
    def forward(ctx, scratch, value, index):
        ctx.index = index
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.index], None


class Solver(nn.Module):
    """Makes steps until a value is reached."""

    def __init__(self):
        super().__init__()
        self.enter, self.field = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.slope, self.leave = nn.Linear(32, 8), nn.Linear(8, 2)

    def forward(self, x, most):
        y, steps = self.enter(x), 0
        while steps < most:
            stages = Assigned.apply(x.new_empty(2, *y.shape), self.slope(self.field(y)), 0)
            half = y + 0.5 * stages[0]
            stages = Assigned.apply(stages, self.slope(self.field(half)), 1)
            y, steps = y + 0.3 * stages.sum(0), steps + 1
            if steps == 3:
                y = y + self.slope(self.field(y)).relu()
        return self.leave(y)


@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_what_autograd_functions_hide_has_the_gauge_of_all(init):
    torch.manual_seed(0)
    model = unit_scale(Solver().double(), init=init)
    x, found = torch.randn(16, 8).double(), []
    for most in (1, 2, 4, 1, 3):
        loss = lambda m, most=most: 50 * m(x, most).square().mean()  # noqa: E731
        found.append(check_slopes(model, loss))
    assert all(each == found[0] for each in found)
    assert init == "unit" or set(found[0].values()) == {0}


@pytest.mark.parametrize("first", ["training", "evaluation"])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_the_function_is_the_same_without_gradients(first, without):
    """Autograd functions are seen by what autograd records."""
    torch.manual_seed(0)
    model, x = unit_scale(Solver()), torch.randn(16, 8)
    if first == "training":
        for _ in range(2):
            model(x, 2).sum().backward()
            with without():  # looks again, at gradients that the first look lacked
                wanted = model(x, 2)
    with without():
        found = model.eval()(x, 2)
    assert torch.equal(found, model(x, 2))
    assert torch.equal(found, model.train()(x, 2))
    assert first == "evaluation" or torch.equal(found, wanted)
