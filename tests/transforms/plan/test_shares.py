"""Parameters that are small beside the values that they join keep their shares."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import check_true
from unit_scaling.transforms import ModelPlan, fold, unit_scale

WIDTH, LENGTH = 32, 6


class Joined(nn.Module):
    """A layer, what joins its result, a norm and a head. ``joined`` is as the layers see it."""

    def __init__(self, join, size: float = 0.02) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.positions = nn.Parameter(size * torch.randn(LENGTH, WIDTH))
        self.token = nn.Parameter(size * torch.randn(1, 1, WIDTH))
        self.table = nn.Embedding(LENGTH, WIDTH)
        self.table.weight.data.mul_(size)
        self.head = nn.Linear(WIDTH, 4, bias=False)
        self.join = join
        self.joined = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.join(self, self.layer(x))
        self.joined = y.detach()
        return self.head(F.layer_norm(y, (WIDTH,)))


def masked(m: Joined, y: Tensor) -> Tensor:
    return torch.where((torch.arange(LENGTH) % 3 == 0)[:, None], m.token, y)


JOINS = {
    "sum": lambda m, y: y + m.positions,
    "part of the positions": lambda m, y: m.positions[:LENGTH][None] + y,
    "in place": lambda m, y: y.add_(m.positions),
    "difference": lambda m, y: y - m.positions,
    "rows": lambda m, y: y + m.table(torch.arange(LENGTH)),
    "moved rows": lambda m, y: y + F.dropout(m.table(torch.arange(LENGTH))[None], 0.0),
    "concatenation": lambda m, y: torch.cat([m.token.expand(len(y), -1, -1), y], 1),
    "choice": masked,
    "both": lambda m, y: torch.cat([m.token.expand(len(y), 1, WIDTH), y + m.positions], 1),
}
each_join = pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)


def batch(number: int = 3) -> Tensor:
    return torch.randn(number, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def whys(model: nn.Module) -> list[str]:
    return [row.why for row in uu.report(model) if "shares" in row.why]


@each_join
def test_the_joined_values_are_those_of_the_plain_model(join):
    """Up to one factor, and to what the rule of the layer misses of RMS 1."""
    model = Joined(join)
    model(batch(64))
    scaled = unit_scale(model)
    scaled(batch(64))
    assert whys(scaled)
    ours, plain = scaled.joined, model.joined
    assert ours.square().mean().sqrt().item() == pytest.approx(1, abs=0.1)
    factor = (ours * plain).sum() / plain.square().sum()
    error = (ours / factor - plain).flatten(0, 1).norm(dim=0).norm() / plain.norm()
    assert error < 0.02


@each_join
def test_gradients_are_true(join):
    model = unit_scale(Joined(join).double())
    check_true(model, lambda m: m(batch().double()).square().sum())


@each_join
def test_shares_are_folded(join):
    model = unit_scale(Joined(join))
    expected = model(batch())
    torch.testing.assert_close(fold(model)(batch()), expected, rtol=1e-5, atol=1e-6)


@each_join
def test_comparable_terms_have_the_rule(join):
    """The layer's results have RMS 0.58."""
    model = unit_scale(Joined(join, size=0.5))
    model(batch())
    assert not whys(model)


def test_a_larger_parameter():
    """Positions of RMS 1 stay larger than the values."""
    model = unit_scale(Joined(JOINS["sum"], size=3.0))
    model(batch())
    assert whys(model) == ["terms keep their shares, 0.2, 0.97"]


def test_a_token_of_zeros_has_no_share():
    """It is drawn from a standard normal: there is no share to keep."""
    model = Joined(JOINS["concatenation"])
    nn.init.zeros_(model.token)
    scaled = unit_scale(model)
    scaled(batch())
    assert not whys(scaled)


def test_preserve_has_no_shares():
    model = Joined(JOINS["both"])
    kept = unit_scale(model, init="preserve")
    assert torch.equal(kept(batch()), model(batch()))
    assert not whys(kept)


def test_shares_are_those_of_the_first_call():
    """Training, another batch and evaluation do not change them; nor does a state_dict."""
    model = unit_scale(Joined(JOINS["both"]))
    model(batch()).sum().backward()
    before = whys(model)
    with torch.no_grad():
        model.positions.mul_(5)
        model.layer.weight.mul_(0.1)
    trained = copy.deepcopy(model.state_dict())
    expected = model.eval()(batch(1))
    assert whys(model) == before
    fresh = unit_scale(Joined(JOINS["both"]))
    fresh.load_state_dict(trained)
    assert torch.equal(fresh.eval()(batch(1)), expected)
    text = uu.plan(model).to_json()
    again = unit_scale(Joined(JOINS["both"]), plan=ModelPlan.from_json(text))
    again.load_state_dict(trained)
    assert torch.equal(again.eval()(batch(1)), expected)
