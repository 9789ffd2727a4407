"""What a forward pass changes is changed once, and by no recording."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import fp8
from unit_scaling.transforms import unit_scale


class Momentum(nn.Module):
    """An encoder whose forward pass updates a second one, as in momentum contrast."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        with torch.no_grad():
            for new, old in zip(self.online.parameters(), self.target.parameters(), strict=True):
                self.update(old, new)
            key = self.target(x)
        head = self.heads[int(random.random() * 2)]  # as in scheduled sampling
        noise = torch.as_tensor(np.random.rand(4))  # noqa: NPY002
        return (head(self.online(x)) - key + noise).square().mean()


def assign(old, new):
    old.data = 0.5 * old.data + 0.5 * new.data


UPDATES = {
    "assigned": assign,
    "through .data": lambda old, new: old.data.mul_(0.5).add_(new.data, alpha=0.5),
    "in place": lambda old, new: old.mul_(0.5).add_(new, alpha=0.5),
    "several at once": lambda old, new: torch._foreach_lerp_([old], [new], 0.5),
}


def losses(model, x):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    return [model(x).item() for _ in range(4)]


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_what_a_forward_pass_writes_is_written_once(update):
    torch.manual_seed(0)
    model, x = Momentum(update).double(), torch.randn(8, 4).double()
    others = unit_scale(model, init="preserve"), fp8.convert(copy.deepcopy(model), "static")
    before = copy.deepcopy(others[1].state_dict())
    fp8.calibrate(others[1], x)
    assert all(torch.equal(before[n], p) for n, p in others[1].named_parameters())
    storage = [p.data_ptr() for p in others[0].parameters()]
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    assert others[0](x).item() == losses(copy.deepcopy(model), x)[0]
    if update is not assign:
        assert storage == [p.data_ptr() for p in others[0].parameters()]
    assert losses(unit_scale(model, init="preserve"), x) == losses(model, x)


class Counting(nn.Module):
    """Branches by how often it has run, as alternating or warming-up models do."""

    def __init__(self):
        super().__init__()
        self.norm, self.heads = nn.BatchNorm1d(4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.steps = 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = self.norm(x)
        self.steps += 1
        self.mean = 0.5 * self.mean + x.detach()[0]
        self.norm.weight.data *= 1.5
        for head in self.heads[: 1 + self.steps % 3]:
            x = x + head(x).tanh()
        return (x + self.mean).square().mean()


def test_a_call_in_which_the_model_is_recorded_changes_what_it_does_once():
    torch.manual_seed(0)
    model, x = Counting().double(), torch.randn(8, 4).double()
    scaled = unit_scale(model, init="preserve")
    assert [scaled(x).item() for _ in range(6)] == [model(x).item() for _ in range(6)]
    assert scaled.steps == model.steps
    ours, expected = scaled.state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
