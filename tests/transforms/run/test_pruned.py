"""Models whose weights `torch.nn.utils.prune` masks."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch.nn.utils import prune

import unit_scaling as uu
import unit_scaling.functional as U
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.run.state import EXTRA_STATE, MARKER


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4, bias=False))
    for part in (net[0], net[2]):
        prune.l1_unstructured(part, "weight", amount=0.5)
    return net


def test_a_pruned_weight_is_a_weight() -> None:
    """At RMS 1, with zeros that stay, through training, in a copy and after `prune.remove`."""
    plain, x = model(), torch.randn(64, 16)
    net = unit_scale(plain)
    y = net(x)
    assert {*net.state_dict()} - {MARKER, EXTRA_STATE} == {*plain.state_dict()}
    rms = net[0].weight.square().mean().sqrt()
    torch.testing.assert_close(rms, torch.tensor(1.0))
    hidden = U.relu(U.linear(x, net[0].weight, net[0].bias, constraint=None))
    expected = U.linear_readout(hidden, net[2].weight, constraint=None)
    torch.testing.assert_close(y, expected)
    assert net[2].weight_orig.mup_type == "output"
    assert not uu.report(net).left_alone
    y.square().mean().backward()
    zeros = net[0].weight_mask == 0
    assert not net[0].weight_orig.grad[zeros].any()
    uu.optim.SGD(net.parameters(), lr=0.1).step()
    after = net(x)
    assert not net[0].weight[zeros].any()
    torch.testing.assert_close(unit_scale(net)(x), after)
    torch.testing.assert_close(pickle.loads(pickle.dumps(unit_scale(net)))(x), after)
    for part in (net[0], net[2]):
        prune.remove(part, "weight")
    torch.testing.assert_close(net(x), after)
    assert copy.deepcopy(net)(x).equal(after)
