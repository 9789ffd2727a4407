"""Copies of models that keep functions of their parts, or tensors of their last call."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unit_scaling as uu
from fp8.common.copies import deep_copy
from tests.transforms.models import Net
from unit_scaling.transforms import compile, simulate_fp8, unit_scale


def block(how: str) -> nn.Module:
    """As minGPT writes its MLP: a lambda that holds an `nn.ModuleDict`. how: where it holds it."""
    mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "act": nn.GELU(), "down": nn.Linear(16, 8)})
    parts = [*mlp.values()]

    def repeated(x: Tensor, times: int = 1) -> Tensor:
        return repeated(mlp.down(mlp.act(mlp.up(x))), times - 1) if times else x

    model = Net(lambda m, x: m.head(x + m.run(x)), mlp=mlp, head=nn.Linear(8, 4))
    model.run = {
        "closure": lambda x: mlp.down(mlp.act(mlp.up(x))),
        "default": lambda x, m=mlp: m.down(m.act(m.up(x))),
        "nested": lambda x: repeated(x),
        "list": lambda x: parts[2](parts[1](parts[0](x))),
    }[how]
    return model


@pytest.mark.parametrize("how", ["closure", "default", "nested", "list"])
def test_a_function_of_a_copy_runs_the_parts_of_the_copy(how: str) -> None:
    torch.manual_seed(0)
    model, x = block(how), torch.randn(8, 8)
    before = model(x)
    ours = unit_scale(model)
    ours(x).square().mean().backward()
    assert all(p.grad is not None for p in ours.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(x), before)
    scaled = {row.path for row in uu.report(ours) if row.done == "scaled"}
    assert scaled == {"mlp.up", "mlp.down", "head"}
    model.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(model(x), ours(x))
    assert not torch.equal(simulate_fp8(ours)(x), ours(x))


def keeping(m: Any, x: Tensor) -> Tensor:
    """Keeps what it computes for who looks at it, in several places."""
    m.maps = [m.body(x).softmax(-1)]
    m.seen = {"logits": m.head(m.maps[0])}
    m.last_loss = nn.functional.cross_entropy(m.seen["logits"], torch.arange(len(x)) % 4)
    return m.last_loss


def test_a_model_that_keeps_tensors_of_its_last_call() -> None:
    """`copy.deepcopy` refuses those with a graph: of copies they have the values."""
    torch.manual_seed(0)
    plain = Net(keeping, body=nn.Linear(8, 8), head=nn.Linear(8, 4))
    x = torch.randn(8, 8)
    plain(x)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(plain)
    other = deep_copy(plain)
    assert torch.equal(other.last_loss, plain.last_loss)
    assert torch.equal(other.maps[0], plain.maps[0])
    assert other.last_loss.grad_fn is None
    assert plain.last_loss.grad_fn is not None
    ours = unit_scale(plain)
    ours(x).backward()
    assert uu.verify(ours, x).share("gradient") > 0
    for transformed in (ours.eval(), simulate_fp8(ours), compile(ours)):  # recorded anew in eval
        assert isinstance(transformed, Net)
    assert ours(x).isfinite()


class Tapped(nn.Module):
    """Reads a hidden layer by a hook of its own, as BYOL does. how: what the hook is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.projector = nn.Linear(16, 8)
        self.hidden: dict[torch.device, Tensor] = {}
        hooks = {
            "method": self.keep,
            "closure": lambda module, args, output: self.keep(module, args, output),
            "of another object": keep_outside,
        }
        self.net[1].register_forward_hook(hooks[how])

    def keep(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self.hidden[args[0].device] = output.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.clear()
        self.net(x)
        return self.projector((self.hidden or OUTSIDE).pop(x.device))


OUTSIDE: dict[torch.device, Tensor] = {}


def keep_outside(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    """As transformers collects hidden states."""
    OUTSIDE[args[0].device] = output


@pytest.mark.parametrize("how", ["method", "closure", "of another object"])
def test_a_model_may_read_what_its_own_hook_keeps(how: str) -> None:
    torch.manual_seed(0)
    plain, x = Tapped(how), torch.randn(64, 8)
    seen: list[object] = []
    plain.net.register_forward_hook(lambda *args: seen.append(args))  # a hook of someone else's
    ours = unit_scale(plain)
    ours(x).square().mean().backward()
    assert seen
    assert not plain.hidden
    assert any(row.path == "projector" and row.done == "scaled" for row in uu.report(ours))
    seen.clear()
    ours(x)
    assert len(seen) == 1
    assert ours.net[0].weight.grad is not None
    assert plain.net[0].weight.grad is None
    assert simulate_fp8(ours)(x).isfinite().all()


def test_parametrized_layers_have_copies_of_their_own() -> None:
    """torch's copy of such a layer is made from an object that is gone after it: its id is free."""
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(30)]
    model = unit_scale(nn.Sequential(*layers))
    for _ in range(3):
        assert len(list(copy.deepcopy(model).modules())) == len(list(model.modules()))


def ordinary() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
    return nn.Sequential(net, nn.Linear(16, 4))


class Pickling(nn.Sequential):
    """Copies a part by pickling it, as the modules of e3nn with generated code do."""

    def __getstate__(self) -> dict[str, Any]:
        parts = {name: part for name, part in self._modules.items() if name != "0"}
        return {**vars(self), "_modules": parts, "pickled": pickle.dumps(self[0])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        part = pickle.loads(state.pop("pickled"))
        super().__setstate__(state)
        self._modules = {"0": part, **self._modules}


def test_a_part_that_its_owner_copies_by_pickling() -> None:
    """It is transformed as in a model that copies it in the ordinary way."""
    results = []
    for kind in (nn.Sequential, Pickling):
        torch.manual_seed(0)
        ours, x = unit_scale(kind(*ordinary())), torch.randn(64, 8)
        ours(x).square().mean().backward()
        results.append([ours(x), simulate_fp8(ours)(x), *(p.grad for p in ours.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def halved(grad: Tensor, layer: nn.Linear, seen: list[nn.Module]) -> Tensor:
    """A hook of a parameter that refers to its layer."""
    seen.append(layer)
    return grad / 2


@pytest.mark.parametrize("transform", [unit_scale, simulate_fp8, compile])
def test_hooks_of_parameters_are_copied(transform: Any) -> None:
    """A mask of a gradient would be lost silently. What refers to a part refers to that of the
    copy, and a frozen parameter stays frozen."""
    torch.manual_seed(0)
    model, mask = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.arange(8.0) % 2
    seen: list[nn.Module] = []
    done: list[Tensor] = []
    model[0].weight.register_hook(lambda grad: grad * mask)
    model[1].weight.register_hook(partial(halved, layer=model[1], seen=seen))
    model[1].weight.register_post_accumulate_grad_hook(done.append)
    model[0].bias.register_hook(torch.zeros_like)
    model[0].bias.requires_grad_(False)
    ours = transform(model)
    for _ in range(2):
        ours(torch.randn(16, 8)).square().mean().backward()
    assert torch.equal(ours[0].weight.grad.any(0), mask.bool())
    assert {id(part) for part in seen} == {id(ours[1])}
    assert {id(part) for part in done} == {id(ours[1].weight)}
    assert ours[0].bias.grad is None
    assert not ours[0].bias.requires_grad
