"""Losses of tensors that modules keep as attributes, as mixtures of experts keep a balance loss."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.gradients import exponent, gradients, without_gauges
from unit_scaling.transforms import ModelPlan, unit_scale
from unit_scaling.transforms.transformed import plan

INITS = ("unit", "preserve")


@dataclasses.dataclass
class Result:
    entropy: Tensor


class Experts(nn.Module):
    """Keeps its balance loss, another one in a dict of lists, and one in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(32, 64), nn.Linear(64, 4)
        self.down = nn.Linear(64, 32)
        self.forget()

    def forget(self) -> None:
        """deepcopy takes no tensors with a gradient function."""
        self.balance: Tensor | None = None
        self.states: dict[str, list[Tensor]] = {}
        self.result: Result | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        shares = self.gate(hidden).softmax(-1)
        self.balance = shares.mean(0).square().sum()
        self.states = {"spread": [shares.std()]}
        self.result = Result((shares * shares.log()).sum(-1).mean())
        return self.down(hidden * shares[:, :1])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(x + self.first(x)))


Loss = Callable[[nn.Module, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "output": lambda model, x: model(x).square().mean(),
    "kept": lambda model, x: (model(x), model.first.balance + model.second.balance)[1],
    "kept in containers": lambda model, x: (
        model(x),
        model.first.result.entropy.sin() + model.second.states["spread"][0].log(),
    )[1],
    "both": lambda model, x: model(x).square().mean() + 0.1 * model.second.balance,
    "of a part": lambda model, x: (model.first(x), model.first.balance)[1],
}


def made(init: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = unit_scale(Stack().double(), init=init)
    x = torch.randn(16, 32, dtype=torch.float64)
    LOSSES["output"](model, x).backward()
    return model, x


def powers(model: nn.Module, x: Tensor, loss: Loss) -> dict[str, int]:
    """log2 of the gradients of a loss over those of the same forward function."""
    _, found = gradients(model, lambda m: loss(m, x))
    forget(model)
    _, true = gradients(without_gauges(model), lambda m: loss(m, x))
    return {name: exponent(grad, true[name]) for name, grad in found.items()}


def forget(model: nn.Module) -> None:
    model.first.forget()
    model.second.forget()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("init", INITS)
def test_gradients_have_the_powers_of_two_of_the_output(init: str, name: str) -> None:
    model, x = made(init)
    wanted = powers(model, x, LOSSES["output"])
    found = powers(model, x, LOSSES[name])
    assert found
    assert found.items() <= wanted.items()
    assert init == "unit" or set(found.values()) == {0}


def test_what_an_earlier_run_has_kept_is_gauged_once() -> None:
    """A part of the model that has not run again keeps the tensor of before."""
    model, x = made("unit")
    wanted = gradients(model, lambda m: LOSSES["kept"](m, x))[1]
    model.zero_grad()
    model(x)
    kept = model.first.balance
    model.second(x)
    assert model.first.balance is kept
    model.head(x)
    model(x)
    (model.first.balance + model.second.balance).backward()
    for name, grad in wanted.items():
        assert torch.equal(model.get_parameter(name).grad, grad)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 cannot trace id() of a dict")
def test_compiled_and_after_loading() -> None:
    model, x = made("unit")
    value, wanted = gradients(model, lambda m: LOSSES["both"](m, x))
    forget(model)
    torch.manual_seed(0)
    loaded = unit_scale(Stack().double(), plan=ModelPlan.from_json(plan(model).to_json()))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for other in (loaded, compiled):
        other.zero_grad()
        again = LOSSES["both"](other, x)
        again.backward()
        torch.testing.assert_close(again, value)
        inner = getattr(other, "_orig_mod", other)
        for name, grad in wanted.items():
            torch.testing.assert_close(inner.get_parameter(name).grad, grad)
