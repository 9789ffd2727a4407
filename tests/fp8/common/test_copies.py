"""Copies of models whose modules, hooks and losses keep functions of their parts."""

import types
import weakref
from functools import cache, partial, wraps
from typing import ClassVar

import torch
from torch import nn

from fp8.common.copies import deep_copy, sharing_copy, training_copy
from tests.shared import Net, assert_same, both, linears, parametrize, refuses


class Runner:
    """An object of the user's that is no module."""

    def __init__(self, mlp):
        self.mlp = mlp

    def run(self, x):
        return through(self.mlp, x)


def parts():
    return nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})


def batch():
    return torch.randn(3, 8)


def through(mlp, x):
    return mlp["down"](torch.relu(mlp["up"](x)))


def logged(function):
    @wraps(function)
    def call(*args):
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


def by_global(mlp):
    GLOBALS.mlp = mlp
    return GLOBALS.run


WAYS = {
    "closure": lambda mlp: lambda x: through(mlp, x),
    "default": lambda mlp: lambda x, m=mlp: through(m, x),
    "keyword default": lambda mlp: lambda x, *, m=mlp: through(m, x),
    "partial": lambda mlp: partial(through, mlp),
    "partial of a closure": lambda mlp: partial(lambda m, x: through(mlp, x), None),
    "bound method": lambda mlp: Runner(mlp).run,
    "method of a layer": lambda mlp: types.MethodType(through, mlp),
    "method of a closure": lambda mlp: types.MethodType(
        lambda _, x: through(mlp, x), mlp
    ),
    "cached": lambda mlp: (lambda f: lambda x: through(f(), x))(cache(lambda: mlp)),
    "weak reference": lambda mlp: (lambda r: lambda x: through(r(), x))(
        weakref.ref(mlp)
    ),
    "closure over an object": lambda mlp: (lambda r: lambda x: r.run(x))(Runner(mlp)),
    "closure over a closure": lambda mlp: (lambda f: lambda x: f(x))(
        lambda x: through(mlp, x)
    ),
    "decorated": lambda mlp: logged(lambda x: through(mlp, x)),
    "compiled": lambda mlp: torch.compile(lambda x: through(mlp, x), backend="eager"),
    "global": by_global,
    "compiled global": lambda mlp: torch.compile(by_global(mlp), backend="eager"),
}
PLACES = {
    "attribute": (lambda f: f, lambda f, x: f(x)),
    "list": (lambda f: [None, f], lambda f, x: f[1](x)),
    "dict": (lambda f: {"run": f}, lambda f, x: f["run"](x)),
    "tuple": (lambda f: (f,), lambda f, x: f[0](x)),
    "object in a list": (
        lambda f: [types.SimpleNamespace(run=f)],
        lambda f, x: f[0].run(x),
    ),
}


class Block(nn.Module):
    """As minGPT writes its MLP: the module keeps a function of its parts."""

    def __init__(self, way, place="attribute"):
        super().__init__()
        keep, self.call = PLACES[place]
        self.mlp = parts()
        self.kept = keep(WAYS[way](self.mlp))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x + self.call(self.kept, x))


def check_apart(model, made, x):
    """A step of the copy computes the same, and trains all of its parameters and no others."""
    assert_same(made(x), model(x))
    made(x).square().mean().backward()
    assert all(p.grad is not None for p in made.parameters())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    assert not made(x).any()
    assert model(x).all()


@parametrize("way", WAYS)
def test_a_function_of_a_copy_runs_the_parts_of_the_copy(way):
    check_apart(model := Block(way), deep_copy(model), batch())


@parametrize("place", [place for place in PLACES if place != "attribute"])
@parametrize(
    "way",
    ["closure", "partial", "partial of a closure", "method of a closure", "global"],
)
def test_so_does_one_in_a_container(way, place):
    check_apart(model := Block(way, place), deep_copy(model), batch())


@parametrize("way", ["closure", "bound method", "global"])
def test_a_copy_of_a_copy_and_a_copy_that_shares_parameters(way):
    model, x = Block(way), batch()
    first = deep_copy(model)
    second = deep_copy(first)
    first.requires_grad_(False)
    check_apart(model, second, x)
    shared = sharing_copy(model)
    shared.kept(x).square().mean().backward()
    assert model.mlp["up"].weight.grad is not None
    assert shared.mlp["up"].weight is model.mlp["up"].weight
    assert shared.mlp["up"] is not model.mlp["up"]


class Irreps(tuple):
    """A container whose length is undefined, as in e3nn."""

    def __len__(self):
        raise NotImplementedError


def test_a_container_without_a_length_is_copied():
    layer = nn.Linear(2, 2)
    layer.irreps = Irreps(["0e", layer.extra_repr])
    _, extra_repr = deep_copy(layer).irreps
    assert extra_repr.__self__ is not layer


class Registered(nn.Module):
    """Layers that a registry of their class holds."""

    registry: ClassVar = {}
    made: ClassVar = []

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.made.append(self)

    def forward(self, x):
        return self.registry.get("layer", self.layer)(x)


def test_a_registry_of_a_class_that_the_forward_pass_reads_is_refused():
    """Not one that the forward pass does not read, nor one that holds no part."""
    model, x = nn.Sequential(Registered()), torch.randn(2, 4)
    assert_same(deep_copy(model)(x), model(x))
    Registered.registry["layer"] = model[0].layer
    try:
        with refuses(r"Registered.registry .*holds a part of the model", TypeError):
            deep_copy(model)
    finally:
        Registered.registry.clear()


def test_what_cannot_be_copied_is_named():
    class Locked(Runner):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle '_thread.lock' object")

    model = linears(4, 4)
    locked = Locked(model[0])
    model.run = lambda x: locked.run(x)
    with refuses(r"copy of the Locked .* holds a part of the model", TypeError):
        deep_copy(model)


def test_a_step_of_copies_is_apart_from_the_caller_s():
    """The loss reads the copy, whether it is a function or a module, and the optimizer steps it."""
    mlp = parts()
    by_global(mlp)
    margin = nn.Parameter(torch.zeros(()))

    module = Net(lambda m, y: y.square().mean() + m.norm())
    module.scale = nn.Parameter(torch.ones(()))
    module.norm = lambda: mlp["up"].weight.square().mean() * module.scale
    losses = {
        "global": GLOBALS.loss,
        "closure": lambda y: y.square().mean() + mlp["up"].weight.square().mean(),
        "of the optimizer": lambda y: (y - margin).square().mean(),
        "module": module,
    }
    for name, loss in losses.items():
        model = nn.Sequential(mlp["up"], mlp["down"])
        own = [*loss.parameters()] if isinstance(loss, nn.Module) else [margin]
        optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.1)
        before = [p.detach().clone() for p in (*model.parameters(), *own)]
        copied, stepped, its_loss = training_copy(model, optimizer, loss)
        its_loss(copied(batch())).backward()
        stepped.step()
        after = [*model.parameters(), *own]
        assert all(p.grad is None for p in after), name
        assert all(map(torch.equal, after, before)), name
        assert not torch.equal(copied[0].weight, model[0].weight)


def test_an_optimizer_that_steps_in_hooks_steps_the_copy():
    model = linears(8, 8, 4)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    made, _, _ = training_copy(model, None, None)
    made(batch()).square().mean().backward()
    for p, q in both(model, made):
        assert p.grad is None
        assert not torch.equal(p, q)
