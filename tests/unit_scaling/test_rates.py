"""Learning rates without ``lr``, what they are not for, and warnings about others."""

import pytest
import torch
from torch import nn

from tests.shared import Net, refuses
from tests.unit_scaling.test_optim import each_optimizer, lrs
from unit_scaling.optim import SGD, AdamW
from unit_scaling.parameter import tag
from unit_scaling.rules.rates import default_rate
from unit_scaling.transforms import unit_scale


def forward(m, x):
    x = x + m.positions[: x.shape[1]]
    for block in m.blocks:
        x = x + block(torch.relu(x))
    return m.head(m.norm(x))


def scaled():
    """Its first call finds that positions keep their values, and a branch with the last layer."""
    positions = nn.Parameter(0.02 * torch.randn(4, 16))
    ends = {"norm": nn.LayerNorm(16), "head": nn.Linear(16, 4)}
    blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
    return unit_scale(Net(forward, positions=positions, **ends, blocks=blocks))


@each_optimizer
def test_no_default_rate_for_weights_that_are_not_at_an_initialization(cls):
    kept = nn.Linear(4, 4)
    for parameter in kept.parameters():
        tag(parameter, "weight", mup_scale=0.5)
    found = {"keeps its values": kept, "has no mup_type": nn.Linear(4, 4)}
    for why, model in found.items():
        with refuses(f"lr: a parameter .* {why}"):
            cls(model.parameters(), allow_non_unit_scaling_params=True)
        assert cls(model.parameters(), 0.1, allow_non_unit_scaling_params=True)


@each_optimizer
def test_the_default_rate_is_for_weights_that_keep_their_values_beside_others(cls):
    """Also where groups part them, as those that do not decay."""
    model = scaled()
    model(2**-6 * torch.randn(2, 4, 16))
    assert model.positions.mup_scale == 2**-6
    still = [model.positions, *model.norm.parameters()]
    rest = [*model.blocks.parameters(), *model.head.parameters()]
    opt = cls(
        [{"params": rest, "weight_decay": 1e-4}, {"params": still, "weight_decay": 0.0}]
    )
    rule = "sgd" if cls is SGD else "adam"
    assert lrs(opt) == pytest.approx([default_rate(rule, p) for p in (*rest, *still)])


def test_a_kind_whose_rate_is_zero_learns_once_it_is_another():
    model = scaled()
    opt = AdamW(model.parameters(), lr_mult={"output": 0.0, "norm": 0.0})
    x, last = torch.randn(2, 4, 16), model.blocks[5].weight
    model(x)
    before = last.detach().clone(), model.norm.weight.detach().clone()
    model(x).square().mean().backward()
    opt.step()
    assert last.mup_type == "weight"
    assert not torch.equal(last, before[0])
    assert torch.equal(model.norm.weight, before[1])
