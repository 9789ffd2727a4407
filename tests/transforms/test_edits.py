"""Models that are edited after `unit_scale`: before the first call, as a model that was edited
before it was transformed; later, as a plain model with the same values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

import fp8
import unit_scaling as uu
from tests.transforms.models import Net, hooks_of
from unit_scaling.parameter import tags_of
from unit_scaling.transforms import unit_scale

SIZE = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.GELU()
        self.down = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def wrapped(inner: nn.Module) -> nn.Module:
    return Net(lambda m, x: m.inner(x), inner=inner)


def other(layer: nn.Linear) -> nn.Module:
    """A layer that takes the place of a linear one, with its parameters, as libraries have."""
    new = Net(lambda m, x: F.linear(x, m.weight, m.bias))
    new.weight, new.bias = layer.weight, layer.bias
    return new


def new_linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(SIZE, SIZE)


def plain() -> nn.Sequential:
    """Of weights of many sizes, so that a number of another one shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Block(), Block(), nn.Linear(SIZE, SIZE))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim() > 1:
                p.mul_((0.3, 2.0, 3.0)[i % 3])
    return model


X = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))

EDITS: dict[str, Callable[[Any], Any]] = {
    "put in a layer": lambda m: setattr(m[1], "norm", nn.Sequential(nn.LayerNorm(SIZE), nn.Tanh())),
    "put in a weight": lambda m: setattr(m[1], "up", new_linear()),
    "add a layer": lambda m: m.append(new_linear()),
    "wrap a part": lambda m: setattr(m[1], "down", wrapped(m[1].down)),
    "wrap the model": wrapped,
    "mask the smallest": lambda m: prune.l1_unstructured(m[1].up, "weight", amount=0.3),
    "parametrize by the identity": lambda m: register_parametrization(
        m[1].up, "weight", nn.Identity()
    ),
    "weight norm": lambda m: parametrizations.weight_norm(m[1].up),
    "delete a block": lambda m: m.__delitem__(1),
    "move a block": lambda m: m.insert(1, m.pop(2)),
    "share a block": lambda m: m.__setitem__(2, m[1]),
    "tie weights": lambda m: setattr(m[2].up, "weight", m[1].up.weight),
    "copy a layer": lambda m: setattr(m[1], "up", copy.deepcopy(m[1].up)),
    "copy a layer to another": lambda m: setattr(m[2], "up", copy.deepcopy(m[1].up)),
    "another class": lambda m: setattr(m[1], "up", other(m[1].up)),
    "freeze": lambda m: m.requires_grad_(False)[3].requires_grad_(True),
    "assign a state dict": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
    "convert and revert": lambda m: fp8.revert(fp8.convert(m, "tensor")),
    "replace a forward": lambda m: setattr(m[1], "forward", lambda x: m[1].down(m[1].up(x))),
}

OTHER_MODELS = {"wrap the model", "convert and revert"}
"""Edits that return the model; the others change it in place."""


def edited(model: Any, name: str) -> Any:
    result = EDITS[name](model)
    return result if name in OTHER_MODELS else model


@pytest.mark.parametrize("name", EDITS)
def test_edits_before_the_first_call(name: str) -> None:
    model, reference = edited(unit_scale(plain()), name), edited(plain(), name)
    model(X)
    reference = unit_scale(reference, batch=X)
    for (path, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, msg=path)
        ours, theirs = tags_of(p), tags_of(q)
        assert ours._replace(mup_scale=1) == theirs._replace(mup_scale=1), path
        assert ours.mup_scale == pytest.approx(theirs.mup_scale), path
    torch.testing.assert_close(model(X), reference(X), rtol=1e-5, atol=1e-6)
    assert len(hooks_of(model)) == len(hooks_of(reference))


@pytest.mark.parametrize("name", EDITS)
def test_edits_after_the_first_call(name: str) -> None:
    model, reference = unit_scale(plain()), plain()
    model(X)
    reference.load_state_dict(model.state_dict(), strict=True)
    model, reference = edited(model, name), edited(reference, name)
    assert torch.equal(model(X), reference(X))
    for (path, p), (theirs, q) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert path == theirs
        assert torch.equal(p, q)
        assert p.requires_grad == q.requires_grad
    compiled = [torch.compile(m, backend="eager") for m in (model, reference)]
    torch.compiler.reset()
    assert torch.equal(compiled[0](X), compiled[1](X))


def test_a_part_that_is_unit_scaled_already_is_refused() -> None:
    model = plain()
    model[1] = unit_scale(model[1])
    with pytest.raises(ValueError, match="the model is unit-scaled already"):
        unit_scale(model)


def test_a_pruned_weight_keeps_its_values() -> None:
    """With zeros that stay, through training, in a copy and after `prune.remove`."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4, bias=False))
    for part in (plain[0], plain[2]):
        prune.l1_unstructured(part, "weight", amount=0.5)
    x = torch.randn(64, 16)
    net = unit_scale(plain)
    y = net(x)
    assert torch.equal(y, plain(x))
    assert net[2].weight_orig.mup_type == "weight"
    assert {row.path for row in uu.report(net) if row.done == "keeps its values"} == {"0", "2"}
    y.square().mean().backward()
    uu.optim.SGD(net.parameters(), lr=0.1).step()
    after = net(x)
    assert not torch.equal(after, y)
    assert not net[0].weight[net[0].weight_mask == 0].any()
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), after)
    for part in (net[0], net[2]):
        prune.remove(part, "weight")
    assert torch.equal(copy.deepcopy(net)(x), after)


# PEFT


def adapted(model: nn.Module, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], **settings)
    return peft.get_peft_model(model, config)


def trained(model: Any) -> Tensor:
    """What it computes after two steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(X)


def test_adapters_on_a_model_that_has_run() -> None:
    model, reference = unit_scale(plain()), plain()
    expected = model(X)
    reference.load_state_dict(model.state_dict())
    ours, theirs = adapted(model), adapted(reference)
    assert torch.equal(ours(X), expected)
    assert torch.equal(trained(ours), trained(theirs))
    assert torch.equal(ours.merge_and_unload()(X), theirs.merge_and_unload()(X))


def test_adapters_on_a_model_that_has_not_run() -> None:
    """They are parts of the model that is decided on."""
    model = adapted(unit_scale(plain()))
    reference = unit_scale(adapted(plain()), batch=X)
    torch.testing.assert_close(model(X), reference(X), rtol=1e-5, atol=1e-6)
    assert not hooks_of(model)


def test_layers_beside_adapters_are_saved(tmp_path) -> None:
    """peft looks for the names in the state_dict of a layer in that of the model. The adapter loads
    on a plain model with the values of the base."""
    torch.manual_seed(0)
    base = nn.Sequential(Block(), nn.Linear(SIZE, 2))
    scaled = unit_scale(base, batch=X)
    base.load_state_dict(scaled.state_dict(), strict=True)
    model = adapted(scaled, modules_to_save=["1"])
    expected = trained(model)
    model.save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        saved = file.get_tensor("base_model.model.1.weight")
    assert torch.equal(saved, model.base_model.model[1].modules_to_save.default.weight)
    peft = pytest.importorskip("peft")
    assert torch.equal(peft.PeftModel.from_pretrained(base, tmp_path)(X), expected)


def test_a_forward_around_that_of_the_model() -> None:
    """As accelerate's, for mixed precision."""
    torch.manual_seed(0)
    inner = nn.Sequential(Block(), nn.Linear(SIZE, SIZE))
    model, reference = unit_scale(inner), unit_scale(inner)
    forward = model.forward
    model.forward = lambda x: forward(x).float().relu()
    loss, expected = model(X).sum(), reference(X).relu().sum()
    loss *= 2.0  # as transformers' Trainer
    loss.backward()
    (2.0 * expected).backward()
    for mine, p in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, p.grad)
