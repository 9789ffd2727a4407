"""Copies of models whose modules, hooks and losses keep functions of their parts."""

from __future__ import annotations

import gc
import types
import weakref
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from fp8.common.copies import deep_copy, sharing_copy, training_copy
from fp8.lab.parity.parity import parity


class Runner:
    """An object of the user's that is no module."""

    def __init__(self, mlp: nn.Module) -> None:
        self.mlp = mlp

    def run(self, x: Tensor) -> Tensor:
        return self.mlp["down"](torch.relu(self.mlp["up"](x)))


def through(mlp: nn.Module, x: Tensor) -> Tensor:
    return mlp["down"](torch.relu(mlp["up"](x)))


def logged(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


#: What a notebook has: the model is a global of the file that defines the function.
GLOBALS = types.ModuleType("notebook")
exec(
    "def inner(x):\n    return mlp['up'](x)\n"
    "def run(x):\n    return mlp['down'](inner(x).relu())\n"
    "def loss(y):\n    return y.square().mean() + mlp['up'].weight.square().mean()\n",
    vars(GLOBALS),
)


def by_global(mlp: nn.Module) -> Any:
    GLOBALS.mlp = mlp
    return GLOBALS.run


WAYS = {
    "closure": lambda mlp: lambda x: mlp["down"](torch.relu(mlp["up"](x))),
    "default": lambda mlp: lambda x, m=mlp: m["down"](torch.relu(m["up"](x))),
    "keyword default": lambda mlp: lambda x, *, m=mlp: m["down"](torch.relu(m["up"](x))),
    "partial": lambda mlp: partial(through, mlp),
    "partial of a closure": lambda mlp: partial(lambda m, x: through(mlp, x), None),
    "bound method": lambda mlp: Runner(mlp).run,
    "method of a layer": lambda mlp: types.MethodType(through, mlp),
    "closure over an object": lambda mlp: (lambda r: lambda x: r.run(x))(Runner(mlp)),
    "closure over a closure": lambda mlp: (lambda f: lambda x: f(x))(lambda x: through(mlp, x)),
    "decorated": lambda mlp: logged(lambda x: through(mlp, x)),
    "compiled": lambda mlp: torch.compile(lambda x: through(mlp, x), backend="eager"),
    "global": by_global,
    "compiled global": lambda mlp: torch.compile(by_global(mlp), backend="eager"),
}
PLACES = {
    "attribute": (lambda f: f, lambda f, x: f(x)),
    "list": (lambda f: [None, f], lambda f, x: f[1](x)),
    "dict": (lambda f: {"run": f}, lambda f, x: f["run"](x)),
}


class Block(nn.Module):
    """As minGPT writes its MLP: the module keeps a function of its parts."""

    def __init__(self, way: str, place: str = "attribute") -> None:
        super().__init__()
        keep, self.call = PLACES[place]
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.kept = keep(WAYS[way](self.mlp))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.call(self.kept, x))


def check_apart(model: nn.Module, made: nn.Module, x: Tensor) -> None:
    """A step of the copy computes the same, and trains all of its parameters and no others."""
    torch.testing.assert_close(made(x), model(x), rtol=0, atol=0)
    made(x).square().mean().backward()
    assert all(p.grad is not None for p in made.parameters())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    assert not made(x).any()
    assert model(x).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_function_of_a_copy_runs_the_parts_of_the_copy(way: str) -> None:
    torch._dynamo.reset()
    check_apart(model := Block(way), deep_copy(model), torch.randn(3, 8))


@pytest.mark.parametrize("place", [place for place in PLACES if place != "attribute"])
@pytest.mark.parametrize("way", ["closure", "partial", "partial of a closure", "global"])
def test_so_does_one_in_a_container(way: str, place: str) -> None:
    check_apart(model := Block(way, place), deep_copy(model), torch.randn(3, 8))


@pytest.mark.parametrize("way", ["closure", "bound method", "global"])
def test_a_copy_of_a_copy_and_a_copy_that_shares_parameters(way: str) -> None:
    model, x = Block(way), torch.randn(3, 8)
    first = deep_copy(model)
    second = deep_copy(first)
    first.requires_grad_(False)
    check_apart(model, second, x)
    shared = sharing_copy(model)
    shared.kept(x).square().mean().backward()
    assert model.mlp["up"].weight.grad is not None
    assert shared.mlp["up"].weight is model.mlp["up"].weight
    assert shared.mlp["up"] is not model.mlp["up"]


def test_functions_that_know_no_part_are_the_same_objects() -> None:
    model = nn.Linear(4, 4)
    model.act, model.settings = partial(F.gelu, approximate="tanh"), {"act": F.relu}
    made = deep_copy(model)
    assert made.settings["act"] is F.relu
    assert made.act.func is F.gelu


class Irreps(tuple):
    """A container whose length is undefined, as in e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_container_without_a_length_is_copied() -> None:
    layer = nn.Linear(2, 2)
    layer.irreps = Irreps(["0e", layer.extra_repr])
    _, extra_repr = deep_copy(layer).irreps
    assert extra_repr.__self__ is not layer


def test_a_copy_leaves_nothing_behind() -> None:
    model = Block("global")
    seen = weakref.ref(deep_copy(model))
    gc.collect()
    assert seen() is None


def test_what_cannot_be_copied_is_named() -> None:
    class Locked(Runner):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle '_thread.lock' object")

    model = nn.Sequential(nn.Linear(4, 4))
    locked = Locked(model[0])
    model.run = lambda x: locked.run(x)
    with pytest.raises(TypeError, match=r"copy of the Locked .* holds a part of the model"):
        deep_copy(model)


def test_a_step_of_copies_is_apart_from_the_caller_s() -> None:
    """The loss reads the copy, whether it is a function or a module, and the optimizer steps it,
    also in a hook of the backward pass."""
    mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
    by_global(mlp)
    margin = nn.Parameter(torch.zeros(()))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.norm = lambda: mlp["up"].weight.square().mean() * self.scale

        def forward(self, y: Tensor) -> Tensor:
            return y.square().mean() + self.norm()

    losses = {
        "global": GLOBALS.loss,
        "closure": lambda y: y.square().mean() + mlp["up"].weight.square().mean(),
        "of the optimizer": lambda y: (y - margin).square().mean(),
        "module": Loss(),
    }
    for name, loss in losses.items():
        model = nn.Sequential(mlp["up"], mlp["down"])
        own = [*loss.parameters()] if isinstance(loss, nn.Module) else [margin]
        optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.1)
        before = [p.detach().clone() for p in (*model.parameters(), *own)]
        copied, stepped, its_loss = training_copy(model, optimizer, loss)
        assert copied is not None
        assert stepped is not None
        assert its_loss is not None
        if name != "of the optimizer":
            copied.requires_grad_(False)
            copied[0].weight.requires_grad_()
        value = its_loss(copied(torch.randn(3, 8)))
        value.backward()
        stepped.step()
        assert all(p.grad is None for p in (*model.parameters(), *own)), name
        after = [*model.parameters(), *own]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), name
        assert not torch.equal(copied[0].weight, model[0].weight)


def test_an_optimizer_that_steps_in_hooks_steps_the_copy() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    made, _, _ = training_copy(model, None, None)
    made(torch.randn(3, 8)).square().mean().backward()
    for p, q in zip(model.parameters(), made.parameters(), strict=True):
        assert p.grad is None
        assert not torch.equal(p, q)


def test_studies_compute_with_the_copy() -> None:
    """Each makes its copies in its own way: of all of them the functions are the copy's."""
    torch.manual_seed(0)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 16)
            layer, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
            self.layer = layer
            self.run = lambda x: torch.relu(layer(x))

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.run(self.embed(ids)))

    model, ids = Logits(), torch.randint(16, (2, 32))
    ours = fp8.Policy(None, rules=[("layer", None, "mxfp4")])
    assert parity(model, [ids], rollout=ours, bound=1.0).kl > 1e-4
    found = fp8.blame(model, ids, lambda y: y.logsumexp(-1).mean(), policy=ours, optimizer=None)
    assert found.low.loss != found.high.loss
    assert all(p.grad is None for p in model.parameters())
