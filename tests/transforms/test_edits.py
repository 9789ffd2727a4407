"""Models that are edited between `unit_scale` and the first call: as models that were edited before
they were transformed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fp8
import unit_scaling as uu
from tests.shared import Net, assert_close, both, pairs, parametrize, seeded
from tests.transforms.models import hooks_of
from unit_scaling.parameter import tags_of
from unit_scaling.transforms import unit_scale

SIZE = 8


def residual(m, x):
    return x + m.down(m.act(m.up(m.norm(x))))


def block():
    up, down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    return Net(residual, norm=nn.LayerNorm(SIZE), up=up, act=nn.GELU(), down=down)


def wrapped(inner):
    return Net(lambda m, x: m.inner(x), inner=inner)


def other(layer):
    """A layer that takes the place of a linear one, with its parameters, as libraries have."""
    new = Net(lambda m, x: nn.functional.linear(x, m.weight, m.bias))
    new.weight, new.bias = layer.weight, layer.bias
    return new


def new_linear():
    torch.manual_seed(3)
    return nn.Linear(SIZE, SIZE)


def plain():
    """Of weights of many sizes, so that a number of another one shows."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(SIZE, SIZE), block(), block(), nn.Linear(SIZE, SIZE)
    )
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim() > 1:
                p.mul_((0.3, 2.0, 3.0)[i % 3])
    return model


X = torch.randn(4, SIZE, generator=seeded(1))

EDITS = {
    "put in a layer": lambda m: setattr(
        m[1], "norm", nn.Sequential(nn.LayerNorm(SIZE), nn.Tanh())
    ),
    "add a layer": lambda m: m.append(new_linear()),
    "wrap the model": wrapped,
    "mask the smallest": lambda m: prune.l1_unstructured(m[1].up, "weight", amount=0.3),
    "weight norm": lambda m: parametrizations.weight_norm(m[1].up),
    "delete a block": lambda m: m.__delitem__(1),
    "share a block": lambda m: m.__setitem__(2, m[1]),
    "tie weights": lambda m: setattr(m[2].up, "weight", m[1].up.weight),
    "copy a layer to another": lambda m: setattr(m[2], "up", copy.deepcopy(m[1].up)),
    "another class": lambda m: setattr(m[1], "up", other(m[1].up)),
    "freeze": lambda m: m.requires_grad_(False)[3].requires_grad_(True),
    "assign a state dict": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
    "convert and revert": lambda m: fp8.revert(fp8.convert(m, "tensor")),
}

OTHER_MODELS = {"wrap the model", "convert and revert"}
"""Edits that return the model; the others change it in place."""


def edited(model, name):
    result = EDITS[name](model)
    if name in OTHER_MODELS:
        return result
    return model


@parametrize("name", EDITS)
def test_edits_before_the_first_call(name):
    model, reference = edited(unit_scale(plain()), name), edited(plain(), name)
    model(X)
    reference = unit_scale(reference, batch=X)
    for (path, p), q in pairs(model.named_parameters(), reference.parameters()):
        assert_close(p, q, rtol=1e-6, atol=1e-7, msg=path)
        ours, theirs = tags_of(p), tags_of(q)
        assert ours._replace(mup_scale=1) == theirs._replace(mup_scale=1), path
        assert ours.mup_scale == pytest.approx(theirs.mup_scale), path
    assert_close(model(X), reference(X), rtol=1e-5, atol=1e-6)
    assert len(hooks_of(model)) == len(hooks_of(reference))


def test_a_pruned_weight_keeps_its_values():
    """With zeros that stay through training."""
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4, bias=False))
    for part in (plain[0], plain[2]):
        prune.l1_unstructured(part, "weight", amount=0.5)
    x = torch.randn(64, 16)
    net = unit_scale(plain)
    y = net(x)
    assert torch.equal(y, plain(x))
    assert net[2].weight_orig.mup_type == "weight"
    assert {row.path for row in uu.report(net) if row.done == "keeps its values"} == {
        "0",
        "2",
    }
    y.square().mean().backward()
    uu.optim.SGD(net.parameters(), lr=0.1).step()
    assert not torch.equal(net(x), y)
    assert not net[0].weight[net[0].weight_mask == 0].any()


# PEFT


def adapted(model, **settings):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["up", "down"], **settings
    )
    return peft.get_peft_model(model, config)


def test_adapters_on_a_model_that_has_not_run():
    """They are parts of the model that is decided on."""
    model = adapted(unit_scale(plain()))
    reference = unit_scale(adapted(plain()), batch=X)
    assert_close(model(X), reference(X), rtol=1e-5, atol=1e-6)
    assert not hooks_of(model)


def test_a_forward_around_that_of_the_model():
    """As accelerate's, for mixed precision."""
    inner = nn.Sequential(block(), nn.Linear(SIZE, SIZE))
    model, reference = unit_scale(inner), unit_scale(inner)
    forward = model.forward
    model.forward = lambda x: forward(x).float().relu()
    loss, expected = model(X).sum(), reference(X).relu().sum()
    loss *= 2.0  # as transformers' Trainer
    loss.backward()
    (2.0 * expected).backward()
    for mine, p in both(model, reference):
        assert_close(mine.grad, p.grad)
