"""Models that are edited after `unit_scale` compute what they should, or say why not."""

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
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.state import EXTRA_STATE, MARKER

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


def plain() -> nn.Sequential:
    """Of weights that are not of RMS 1, so that a lost factor shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Block(), Block(), nn.Linear(SIZE, SIZE))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim() > 1:
                p.mul_((0.3, 2.0, 3.0)[i % 3])
    return model


X = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))

EDITS: dict[str, Callable[[Any], Any]] = {
    "put in a new layer": lambda m: setattr(
        m[1], "norm", nn.Sequential(nn.LayerNorm(SIZE), nn.Tanh())
    ),
    "wrap in a module": lambda m: setattr(m[1], "down", wrapped(m[1].down)),
    "wrap the model": wrapped,
    "mask the smallest": lambda m: prune.l1_unstructured(m[1].up, "weight", amount=0.3),
    "parametrize by the identity": lambda m: register_parametrization(
        m[1].up, "weight", nn.Identity()
    ),
    "weight norm": lambda m: parametrizations.weight_norm(m[1].up),
    "delete a block": lambda m: m.__delitem__(1),
    "share a block": lambda m: m.__setitem__(2, m[1]),
    "tie weights": lambda m: setattr(m[2].up, "weight", m[1].up.weight),
    "replace a layer by a copy": lambda m: setattr(m[1], "up", copy.deepcopy(m[1].up)),
    "replace by another class": lambda m: setattr(m[1], "up", other(m[1].up)),
    "assign a state dict": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
    "convert and revert": lambda m: fp8.revert(fp8.convert(m, "unit")),
}
"""Every edit, once on a plain model and once on a transformed one."""

OTHER_MODELS = {"wrap the model", "convert and revert"}
"""Edits that return the model; the others change it in place."""

SAME = {
    *("wrap in a module", "wrap the model", "parametrize by the identity", "weight norm"),
    *("replace a layer by a copy", "convert and revert", "replace by another class"),
    "assign a state dict",
}
"""Edits that leave the function as it is."""


def transformed(model: nn.Module, drift: bool = True) -> Any:
    """With weights that training has moved: no longer of RMS 1."""
    ours = unit_scale(model)
    with torch.no_grad():
        for p in ours.parameters() if drift else ():
            p.mul_(1.25)
    return ours


def edited(model: Any, name: str) -> Any:
    result = EDITS[name](model)
    return result if name in OTHER_MODELS else model


def run(model: Any, compiled: bool) -> Tensor:
    call = torch.compile(model, backend="eager") if compiled else model
    with torch.no_grad():
        return call(X)


COMPILED = ("wrap in a module", "weight norm", "share a block")
"""Edits that are tried with compiled models too."""

whens = pytest.mark.parametrize(
    ("name", "called", "compiled"),
    [(name, called, False) for name in EDITS for called in (False, True)]
    + [(name, True, True) for name in COMPILED],
)


def check(model: Any, name: str, called: bool, compiled: bool, expected: Tensor) -> None:
    """Edits a model, which has run or not, and compares what it computes then."""
    torch.compiler.reset()
    if called:
        run(model, compiled)
    model = edited(model, name)
    for _ in range(2):
        torch.testing.assert_close(run(model, compiled), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@whens
def test_unit_scaled_models(name, called, compiled):
    """As before the edit where that changes nothing; else as a model that was edited before it was
    transformed or, once it has run, as a copy that is edited."""
    same = name in SAME
    model = transformed(plain(), drift=same)
    if name == "weight norm" and not called:
        with pytest.raises(ValueError, match=r"1\.up has a parametrization of its weight"):
            edited(model, name)(X)
        return
    if same:
        expected = copy.deepcopy(model)(X)
    elif called:
        model(X)
        expected = edited(copy.deepcopy(model), name)(X)
    else:
        expected = unit_scale(edited(plain(), name))(X)
    check(model, name, called, compiled, expected)


# Edits that are told


@pytest.mark.parametrize("called", [False, True])
def test_a_new_layer_in_a_unit_scaled_model(called):
    """Its weights are used as they are, and a warning names them once."""
    model = transformed(plain(), drift=False)
    if called:
        model(X)
    model[1].up = nn.Linear(SIZE, SIZE)
    with pytest.warns(fp8.warnings.ScaleWarning, match=r"1\.up\.weight came into the model after"):
        model(X)
    model(X)
    model[1].up = unit_scale(nn.Linear(SIZE, SIZE))  # what the warning says
    assert 0.3 < model(X).square().mean().sqrt() * SIZE**0.5 < 3
    model[1].extra, model[2].up = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    with (
        fp8.strict(),
        pytest.raises(fp8.warnings.ScaleWarning, match=r"1\.extra\.weight \(and 1 more\)"),
    ):
        model(X)


def test_a_part_that_is_unit_scaled_already():
    """It is scaled anew with the model around it."""
    model = plain()
    model[1] = unit_scale(model[1])
    whole = unit_scale(model)
    torch.testing.assert_close(whole(X), unit_scale(plain())(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("called", [False, True])
def test_a_forward_that_is_replaced_in_the_class(called, monkeypatch):
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)))

    model = transformed(plain(), drift=False)
    if called:
        model(X)
    monkeypatch.setattr(Block, "forward", forward)
    expected = unit_scale(plain())(X)
    torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-5)


# Weights that `torch.nn.utils.prune` masks


def test_a_pruned_weight_keeps_its_values() -> None:
    """With zeros that stay, through training, in a copy and after `prune.remove`."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4, bias=False))
    for part in (plain[0], plain[2]):
        prune.l1_unstructured(part, "weight", amount=0.5)
    x = torch.randn(64, 16)
    net = unit_scale(plain)
    y = net(x)
    assert {*net.state_dict()} - {MARKER, EXTRA_STATE} == {*plain.state_dict()}
    for part in (0, 2):
        torch.testing.assert_close(net[part].weight_orig, plain[part].weight_orig)
    torch.testing.assert_close(y, F.linear(F.linear(x, net[0].weight).relu(), net[2].weight))
    assert net[2].weight_orig.mup_type == "weight"  # its product has no factor of a readout
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


# PEFT


def adapted(model: nn.Module, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], **settings)
    return peft.get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore::fp8.warnings.ScaleWarning")
def test_layers_beside_adapters_are_saved(tmp_path):
    """peft looks for the names in the state_dict of a layer in that of the model."""
    model = adapted(unit_scale(nn.Sequential(Block(), nn.Linear(SIZE, 2))), modules_to_save=["1"])
    model(X).sum().backward()
    model.save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        saved = file.get_tensor("base_model.model.1.weight")
    assert torch.equal(saved, model.base_model.model[1].weight)


@pytest.mark.filterwarnings("ignore::fp8.warnings.ScaleWarning")
@pytest.mark.parametrize("called", [False, True])
def test_adapters_on_a_unit_scaled_model(called):
    """As of a model that had them before; once it has run, they change nothing at first."""
    model, before = unit_scale(plain()), plain()
    expected = model(X) if called else unit_scale(adapted(before))(X)
    torch.testing.assert_close(adapted(model)(X), expected, rtol=1e-4, atol=1e-5)


def test_a_forward_around_that_of_the_model_is_outside_of_its_plan():
    """As accelerate's, for mixed precision: what it computes is not recorded as the model's."""
    torch.manual_seed(0)
    plain = unit_scale(nn.Sequential(Block(), nn.Linear(SIZE, SIZE)))
    wrapped = copy.deepcopy(plain)
    inner = wrapped.forward
    wrapped.forward = lambda x: inner(x).float().relu()
    x = torch.randn(4, SIZE)
    loss, expected = wrapped(x).sum(), plain(x).relu().sum()
    loss *= 2.0  # as transformers' Trainer
    loss.backward()
    (2.0 * expected).backward()
    for mine, p in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, p.grad)
    assert not any("relu" in row.call for row in uu.report(wrapped))
