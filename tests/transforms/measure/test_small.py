"""Small parameters that keep their values: a product with one starts at about zero, and stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import check_true
from unit_scaling.transforms import simulate_fp8, unit_scale
from unit_scaling.transforms.run.install import find_scope
from unit_scaling.transforms.run.scope import UnitScale


class Branches(nn.Module):
    """Two branches times a small parameter, each beside its input."""

    def __init__(self, size: float, shape: tuple[int, ...], times: Callable[..., Tensor]) -> None:
        super().__init__()
        self.times = times
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.small = nn.ParameterList(nn.Parameter(torch.full(shape, size)) for _ in range(2))
        torch.manual_seed(0)
        self.register_buffer("x", torch.randn(64, 16))
        self.register_buffer("y", torch.randint(4, (64,)))

    def forward(self) -> Tensor:
        h = self.first(self.x)
        for layer, small in zip(self.layers, self.small, strict=True):
            h = h + self.times(F.relu(layer(h)), small)
        return F.cross_entropy(self.last(h), self.y)


SPELLINGS = {
    "number": ((), torch.mul),
    "a vector of one": ((1,), lambda h, small: h * small.expand(32)),
    "one for each head": ((4, 8), lambda h, small: (h.view(-1, 4, 8) * small).flatten(1)),
    "product": ((1, 1), lambda h, small: (h.view(-1, 32, 1) @ small).flatten(1)),
    "linear": ((32, 32), F.linear),
}


@pytest.mark.parametrize("size", [0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_small_parameter_trains(name: str, size: float) -> None:
    """It learns at the rate of one of RMS 1: a factor of 1 / size for the result would make every
    step too large by that, and one for its cast would saturate."""
    torch.manual_seed(0)
    model = simulate_fp8(unit_scale(Branches(size, *SPELLINGS[name])))
    steps = uu.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        loss = model()
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert max(losses) < 1.05 * losses[0]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("size", [0.1, 1e-6])
@pytest.mark.parametrize("name", SPELLINGS)
def test_its_gradients_are_true(name: str, size: float) -> None:
    torch.manual_seed(0)
    model = unit_scale(Branches(size, *SPELLINGS[name]).double())
    assert len(check_true(model, lambda m: m())) == 10


def test_another_form_of_call_has_no_factor_either() -> None:
    """Once the parameter has grown, too."""
    torch.manual_seed(0)
    model = unit_scale(Branches(1e-3, *SPELLINGS["number"]))
    model().backward()
    with torch.no_grad():
        for parameter, value in zip(model.small, (0.4, 0.01), strict=True):
            parameter.fill_(value)
    model.eval()()
    scope = find_scope(model, UnitScale)
    assert len(scope.plans) == 2
    for plan in scope.plans.values():
        assert not any(plan.corrections[place] for place in plan.corrections if place[1] == "mul")


def test_gradients_fit_e5m2_once_it_has_learned() -> None:
    """They are multiplied by it: at RMS 1 for a parameter of 1e-6, they would leave e5m2."""
    torch.manual_seed(0)
    model = unit_scale(Branches(1e-6, *SPELLINGS["number"]))
    model().backward()
    found: list[float] = []
    for layer in model.layers:
        layer.register_forward_hook(
            lambda _, __, y: y.register_hook(lambda g: found.append(g.abs().max().item())) and None
        )
    model()
    with torch.no_grad():
        for parameter in model.small:
            parameter.fill_(1.0)
    found.clear()
    model().backward()
    assert len(found) == 2
    assert max(found) < torch.finfo(torch.float8_e5m2).max


@pytest.mark.parametrize("number", [1, 32])
def test_slopes_are_no_gains(number: int) -> None:
    """At RMS 1, an nn.PReLU is the identity."""
    model = unit_scale(nn.Sequential(nn.Linear(8, 32), nn.PReLU(number), nn.Linear(32, 8)))
    assert torch.equal(model[1].weight, torch.full((number,), 0.25))
