"""Losses outside a model of tensors that its calls read too: kept as attributes, in arguments, by
hooks, and from one run to the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.gradients import check_slopes, exponent, gradients, without_gauges
from unit_scaling.transforms import ModelPlan, unit_scale
from unit_scaling.transforms.transformed import plan

INITS = ("unit", "preserve")


class Action:
    def __init__(self, value: Any) -> None:
        self.value = value


class Net(nn.Module):
    """Keeps a hidden state, parts of another, one within objects, and fills a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 64)
        self.c, self.head = nn.Linear(32, 64), nn.Linear(64, 8)
        self.forget()

    def forget(self) -> None:
        self.hidden: Tensor | None = None
        self.parts: list[Tensor] = []
        self.action: Any = None

    def forward(self, x: Tensor, store: dict[str, Tensor] | None = None) -> Tensor:
        y = F.gelu(self.a(x))
        self.hidden = y
        self.parts = list(self.b(y).chunk(2, -1))
        z = self.c(self.parts[0] * self.parts[1].sigmoid())
        self.action = Action(Action(z))
        if store is not None:
            store["z"] = z
        return self.head(z.relu())


def batch() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


Loss = Callable[[nn.Module], Tensor]


def output(model: nn.Module) -> Tensor:
    return model(batch()).square().mean()


def hidden(model: nn.Module) -> Tensor:
    model(batch())
    return model.hidden.sin().mean()


def both(model: nn.Module) -> Tensor:
    return 100 * model(batch()).square().mean() + model.hidden.sin().mean()


def parts(model: nn.Module) -> Tensor:
    model(batch())
    return model.parts[1].square().mean() + model.parts[0].cos().mean()


def within_objects(model: nn.Module) -> Tensor:
    model(batch())
    return model.action.value.value.exp().mean()


def argument(model: nn.Module) -> Tensor:
    store: dict[str, Tensor] = {}
    return model(batch(), store).square().mean() + store["z"].square().mean()


def of_a_part(model: nn.Module) -> Tensor:
    return model.b(model.a(batch())).square().mean()


def hook(model: nn.Module) -> Tensor:
    seen: list[Tensor] = []
    handles = [
        model.b.register_forward_hook(lambda module, args, out: seen.append(out)),
        model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
        model.head.register_forward_hook(lambda module, args, out: seen.append(out)),
    ]
    value = model(batch()).square().mean()
    for handle in handles:
        handle.remove()
    first, second, result = seen[-3:]  # the model begins again when its calls are not as planned
    return value + first.sin().mean() + second.cos().mean() + result.square().mean()


LOSSES = (output, hidden, both, parts, within_objects, argument, of_a_part, hook)


def made(init: str) -> nn.Module:
    torch.manual_seed(0)
    model = unit_scale(Net().double(), init=init)
    output(model).backward()
    return model


def powers(model: nn.Module, loss: Loss) -> dict[str, int]:
    """log2 of the gradients of a loss over those of the same forward function."""
    loss(model)
    value, found = gradients(model, loss)
    model.forget()
    again, true = gradients(without_gauges(model), loss)
    model.forget()
    assert torch.equal(value, again)
    return {name: exponent(grad, true[name]) for name, grad in found.items()}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("init", INITS)
def test_gradients_have_the_powers_of_two_of_the_output(init: str, loss: Loss) -> None:
    model = made(init)
    wanted, found = powers(model, output), powers(model, loss)
    assert found
    assert found.items() <= wanted.items()
    assert init == "unit" or set(found.values()) == {0}
    model.forget()
    assert check_slopes(model, loss).items() <= wanted.items()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_function_is_that_without_the_loss(loss: Loss) -> None:
    model = made("unit")
    value = model(batch())
    loss(model).backward()
    assert torch.equal(model(batch()), value)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 cannot trace id() of a dict")
def test_compiled_and_after_loading() -> None:
    model = made("unit")
    value, wanted = gradients(model, both)
    model.forget()
    torch.manual_seed(0)
    loaded = unit_scale(Net().double(), plan=ModelPlan.from_json(plan(model).to_json()))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for other in (loaded, compiled):
        other.zero_grad()
        again = both(other)
        again.backward()
        torch.testing.assert_close(again, value)
        inner = getattr(other, "_orig_mod", other)
        for name, grad in wanted.items():
            torch.testing.assert_close(inner.get_parameter(name).grad, grad)


class Chosen(Net):
    """The number of its calls depends on values."""

    def forward(self, x: Tensor, store: dict[str, Tensor] | None = None) -> Tensor:
        y = super().forward(x, store)
        for _ in range(1 + self.times):
            y = y + 0.1 * y.tanh()
        return y

    times = 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("init", INITS)
def test_where_calls_depend_on_values(init: str, loss: Loss) -> None:
    torch.manual_seed(0)
    model = unit_scale(Chosen().double(), init=init)

    def at(times: int) -> Loss:
        def of(m: nn.Module) -> Tensor:
            m.times = times
            return loss(m)

        return of

    for times in (0, 1, 2, 0, 1):
        model.zero_grad()
        at(times)(model).backward()
    wanted = powers(model, output)
    for times in range(3):
        assert powers(model, at(times)).items() <= wanted.items()


class Memory(nn.Module):
    """Reads the state of its last run, through which gradients flow. start: the first one."""

    def __init__(self, start: Tensor | None) -> None:
        super().__init__()
        self.a, self.r, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.start = self.state = start

    def forget(self) -> None:
        self.state = self.start

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x)
        if self.state is not None:
            z = z + self.r(self.state)
        self.state = torch.tanh(z)
        return self.head(self.state)


def three(model: nn.Module) -> Tensor:
    model.forget()
    value = sum(model(batch() * (1 + i)).square().mean() for i in range(3))
    model.forget()
    return value


@pytest.mark.parametrize("start", [None, torch.zeros(16, 64, dtype=torch.float64)])
@pytest.mark.parametrize("init", INITS)
def test_gradients_through_the_state_of_earlier_runs(init: str, start: Tensor | None) -> None:
    torch.manual_seed(0)
    model = unit_scale(Memory(start).double(), init=init)
    for _ in range(3):
        model.zero_grad()
        three(model).backward()
    wanted = powers(model, three)
    assert init == "unit" or set(wanted.values()) == {0}
    assert check_slopes(model, three) == wanted


def test_only_hooks_of_users_make_a_plan_of_their_own() -> None:
    model = made("unit")
    before = len(plan(model).plans)
    nn.utils.prune.identity(model.head, "weight")
    output(model)
    assert len(plan(model).plans) == before
    model.b.register_forward_hook(lambda *_: None)
    output(model)
    output(model)
    assert len(plan(model).plans) == before + 1


class Sine(torch.autograd.Function):
    """No torch function shows what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


SEEN: list[Tensor] = []


class Results(Net):
    """how: what it returns beside its result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "of a hook":
            self.b.register_forward_hook(lambda module, args, out: SEEN.append(out))

    def forward(self, x: Tensor, store: dict[str, Tensor] | None = None) -> Any:
        SEEN.clear()
        y = super().forward(x, store)
        if self.how == "of a hook":
            return y, *SEEN
        return Sine.apply(y) if self.how == "alone" else (y, Sine.apply(y))


@pytest.mark.parametrize("how", ["alone", "and its argument", "of a hook"])
@pytest.mark.parametrize("init", INITS)
def test_results_that_no_call_of_the_recording_shows(init: str, how: str) -> None:
    torch.manual_seed(0)
    model = unit_scale(Results(how).double(), init=init)

    def loss(m: nn.Module) -> Tensor:
        found = m(batch())
        parts = [found] if isinstance(found, Tensor) else found
        return sum(part.cos().mean() for part in parts)

    loss(model).backward()
    found = powers(model, loss)
    assert init == "unit" or set(found.values()) == {0}
    model.forget()
    assert check_slopes(model, loss) == found


@pytest.mark.parametrize("retained", [False, True])
def test_hooks_of_a_kept_tensor_are_its_own(retained: bool) -> None:
    """Also from the second run on, in which the model holds a tensor of the first."""
    model = made("unit")
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, y: Tensor) -> None:
        seen.append(y)
        y.retain_grad() if retained else y.register_hook(seen.append)

    model.a.register_forward_hook(hook)
    for _ in range(3):
        seen.clear()
        both(model).backward()
        assert seen[0].grad is not None if retained else len(seen) == 2


class Policy(nn.Module):
    """Keeps a mean that its own loss reads, beside a tensor without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mean, self.value = nn.Linear(32, 64), nn.Linear(64, 8), nn.Linear(64, 1)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).tanh()
        mean, _ = torch.broadcast_tensors(self.mean(hidden), x[:, :8])
        self.kept = [mean, hidden.detach()]
        return 0.1 * (mean - 1).square().mean() + self.value(hidden).square().mean()


def test_gradients_stay_the_same_where_the_model_holds_a_tensor_of_an_earlier_run() -> None:
    torch.manual_seed(0)
    model = unit_scale(Policy().double())
    _, first = gradients(model, lambda m: m(batch()))
    for _ in range(2):
        _, found = gradients(model, lambda m: m(batch()))
        for name, grad in found.items():
            torch.testing.assert_close(grad, first[name], rtol=1e-12, atol=0)


class Cell(nn.Module):
    """Keeps both results of an LSTM cell, of which one is computed from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(8, 16), nn.Linear(16, 4)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state)
        return self.out(self.state[0])


@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_results_of_one_call_of_which_one_is_computed_from_the_other(init: str) -> None:
    torch.manual_seed(0)
    model = unit_scale(Cell().double(), init=init)
    x = torch.randn(16, 8, dtype=torch.float64)

    def loss(model: nn.Module) -> Tensor:
        model.state = None  # type: ignore[assignment]
        first, second = model(x).square().mean(), model(x).square().mean()
        return 30 * (first + second) + model.state[1].square().mean()  # type: ignore[index]

    powers = check_slopes(model, loss)
    assert len(powers) == 6
    assert init == "unit" or set(powers.values()) == {0}
