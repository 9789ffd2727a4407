"""Models whose weights `torch.nn.utils.prune` masks."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import unit_scaling as uu
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.state import EXTRA_STATE, MARKER


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4, bias=False))
    for part in (net[0], net[2]):
        prune.l1_unstructured(part, "weight", amount=0.5)
    return net


def test_a_pruned_weight_keeps_its_values() -> None:
    """With zeros that stay, through training, in a copy and after `prune.remove`."""
    plain, x = model(), torch.randn(64, 16)
    net = unit_scale(plain)
    y = net(x)
    assert {*net.state_dict()} - {MARKER, EXTRA_STATE} == {*plain.state_dict()}
    for part in (0, 2):
        torch.testing.assert_close(net[part].weight_orig, plain[part].weight_orig)
    torch.testing.assert_close(y, F.linear(F.linear(x, net[0].weight).relu(), net[2].weight))
    assert net[2].weight_orig.mup_type == "output"
    kept = [row.path for row in uu.report(net) if row.done == "keeps its values"]
    assert kept == ["0", "2"]
    y.square().mean().backward()
    zeros = net[0].weight_mask == 0
    assert not net[0].weight_orig.grad[zeros].any()
    uu.optim.SGD(net.parameters(), lr=0.1).step()
    after = net(x)
    assert not net[0].weight[zeros].any()
    torch.testing.assert_close(pickle.loads(pickle.dumps(net))(x), after)
    for part in (net[0], net[2]):
        prune.remove(part, "weight")
    torch.testing.assert_close(net(x), after)
    assert copy.deepcopy(net)(x).equal(after)
