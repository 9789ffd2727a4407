"""What a forward pass changes is changed once, and by no recording."""

import random
from copy import deepcopy

import numpy as np
import torch
from torch import nn

import fp8
from tests.shared import Net, assert_close, both, parametrize
from unit_scaling.transforms import unit_scale


def momentum(update):
    """An encoder whose forward pass updates a second one, as in momentum contrast."""

    def forward(m, x):
        with torch.no_grad():
            for new, old in both(m.online, m.target):
                update(old, new)
            key = m.target(x)
        head = m.heads[int(random.random() * 2)]  # as in scheduled sampling
        noise = torch.as_tensor(np.random.rand(4))  # noqa: NPY002
        return (head(m.online(x)) - key + noise).square().mean()

    heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    target = nn.Linear(4, 4).requires_grad_(False)
    return Net(forward, online=nn.Linear(4, 4), target=target, heads=heads)


def assign(old, new):
    old.data = 0.5 * old.data + 0.5 * new.data


UPDATES = {
    "assigned": assign,
    "through .data": lambda old, new: old.data.mul_(0.5).add_(new.data, alpha=0.5),
    "several at once": lambda old, new: torch._foreach_lerp_([old], [new], 0.5),
}


def losses(model, x):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    return [model(x).item() for _ in range(4)]


@parametrize("update", UPDATES.values(), ids=UPDATES)
def test_what_a_forward_pass_writes_is_written_once(update):
    model, x = momentum(update).double(), torch.randn(8, 4).double()
    calibrated = fp8.convert(deepcopy(model), "static")
    before = deepcopy(calibrated.state_dict())
    fp8.calibrate(calibrated, x)
    assert all(torch.equal(before[n], p) for n, p in calibrated.named_parameters())
    scaled = unit_scale(model)
    storage = [p.data_ptr() for p in scaled.parameters()]
    losses(scaled, x)
    start, end = model.target.weight, scaled.online.weight
    assert_close(scaled.target.weight, torch.lerp(start, end, 1 - 2.0**-4))
    if update is not assign:
        assert storage == [p.data_ptr() for p in scaled.parameters()]


def counting(m, x):
    """Branches by how often it has run, as alternating or warming-up models do."""
    x = m.norm(x)
    m.steps += 1
    m.mean = 0.5 * m.mean + x.detach()[0]
    m.norm.weight.data *= 1.5
    for head in m.heads[: 1 + m.steps % 3]:
        x = x + head(x).tanh()
    return (x + m.mean).square().mean()


def test_a_call_in_which_the_model_is_recorded_changes_what_it_does_once():
    heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model, x = (
        Net(counting, norm=nn.BatchNorm1d(4), heads=heads),
        torch.randn(8, 4).double(),
    )
    model.steps = 0
    model.register_buffer("mean", torch.zeros(4))
    model = model.double()
    scaled = unit_scale(model)
    for _ in range(6):
        scaled(x)
        model(x)
    assert scaled.steps == model.steps
    ours, expected = scaled.state_dict(), model.state_dict()
    for name in ("mean", *(f"norm.{own}" for own in model.norm.state_dict())):
        assert_close(ours[name], expected[name])
