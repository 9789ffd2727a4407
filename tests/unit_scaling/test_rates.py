"""Learning rates without ``lr``, what they are not for, and warnings about others."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.unit_scaling.test_optim import each_optimizer, lrs
from unit_scaling.optim import SGD, AdamW
from unit_scaling.parameter import tag
from unit_scaling.rules.rates import default_rate
from unit_scaling.transforms import unit_scale


class Net(nn.Module):
    """Its first call finds that positions keep their values, and a branch with the last layer."""

    def __init__(self, positions: int = 4) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(positions, 16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = x + block(torch.relu(x))
        return self.head(self.norm(x))


@each_optimizer
def test_no_default_rate_for_weights_that_are_not_at_an_initialization(cls):
    kept = nn.Linear(4, 4)
    for parameter in kept.parameters():
        tag(parameter, "weight", mup_scale=0.5)
    for model, why in (
        (kept, "keeps its values"),
        (nn.Linear(4, 4), "has no mup_type"),
    ):
        with pytest.raises(ValueError, match=f"lr: a parameter .* {why}"):
            cls(model.parameters(), allow_non_unit_scaling_params=True)
        assert cls(model.parameters(), 0.1, allow_non_unit_scaling_params=True)


@each_optimizer
def test_the_default_rate_is_for_weights_that_keep_their_values_beside_others(cls):
    """Also where groups part them, as those that do not decay."""

    torch.manual_seed(0)
    model = unit_scale(Net())
    model(2**-6 * torch.randn(2, 4, 16))
    assert model.positions.mup_scale == 2**-6
    still = [model.positions, *model.norm.parameters()]
    rest = [*model.blocks.parameters(), *model.head.parameters()]
    opt = cls([{"params": rest, "weight_decay": 1e-4}, {"params": still, "weight_decay": 0.0}])
    rule = "sgd" if cls is SGD else "adam"
    assert lrs(opt) == pytest.approx([default_rate(rule, p) for p in (*rest, *still)])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_the_steps_of_mup_on_weights_of_unit_scale(momentum: float):
    """Those of the plain layer at 5 times the rate: its weight is w = u / sqrt(fan_in)."""
    torch.manual_seed(0)
    batch = torch.randn(64, 16, dtype=torch.float64)
    scaled = unit_scale(nn.Linear(16, 8, bias=False).double(), batch=batch)
    w = nn.Parameter(scaled.weight.detach().clone())
    x = torch.randn(4, 16, dtype=torch.float64)
    ours, plain = SGD(scaled.parameters(), 0.1, momentum), torch.optim.SGD([w], 0.5, momentum)
    for _ in range(3):
        for output in (scaled(x), nn.functional.linear(x, w)):
            output.square().mean().backward()
        ours.step()
        plain.step()
        torch.testing.assert_close(scaled.weight, w)


def test_a_kind_whose_rate_is_zero_learns_once_it_is_another():
    torch.manual_seed(0)
    model = unit_scale(Net())
    opt = AdamW(model.parameters(), lr_mult={"output": 0.0, "norm": 0.0})
    x, last = torch.randn(2, 4, 16), model.blocks[5].weight
    model(x)
    before = last.detach().clone(), model.norm.weight.detach().clone()
    model(x).square().mean().backward()
    opt.step()
    assert last.mup_type == "weight"
    assert not torch.equal(last, before[0])
    assert torch.equal(model.norm.weight, before[1])


@each_optimizer
@pytest.mark.parametrize("how", ["as made", "copied", "pickled", "loaded"])
def test_an_optimizer_made_before_the_first_call_takes_the_steps_of_one_made_after(cls, how: str):
    """Under a schedule, with weight decay, also of a copy."""
    torch.manual_seed(0)
    model = unit_scale(Net().double())
    other = copy.deepcopy(model)
    x = torch.randn(8, 4, 16, dtype=torch.float64)
    other(x)
    kinds = {n: (p.mup_type, p.mup_scale) for n, p in other.named_parameters()}
    assert kinds["positions"] == ("bias", 1.0)
    assert kinds["blocks.5.weight"][0] == "weight"  # not the readout
    settings = {"momentum": 0.9} if cls is SGD else {}
    made = partial(cls, lr=0.1, weight_decay=1e-3, **settings)
    early = made(model.parameters())
    if how == "copied":
        model, early = copy.deepcopy((model, early))
    elif how == "pickled":
        model, early = pickle.loads(pickle.dumps((model, early)))
    late = made(other.parameters())
    schedules = [lr_scheduler.CosineAnnealingLR(opt, 10) for opt in (early, late)]
    for step in range(5):
        for m, opt, schedule in zip((model, other), (early, late), schedules, strict=True):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()
            schedule.step()
        if how == "loaded" and step in (0, 2):
            early.load_state_dict(copy.deepcopy(early.state_dict()))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
