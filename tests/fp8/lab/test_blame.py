"""`fp8.blame` of injected faults: it names the casts, and nothing where casts are not at fault."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8.lab.blame import Blame, _joined, _Part, _smallest, _split
from fp8.lab.trace import quiet
from fp8.recipes.policy import LayerRule
from fp8.recipes.recipe import PRODUCTS

WIDTH, LAYERS = 16, 4


class Network(nn.Module):
    """Layers on a residual stream whose feature 0 is always zero.

    inputs: layer -> what its input is multiplied by, and its output divided by. grads: layer ->
    what the gradient of its output is multiplied by, and that of its input divided by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        for layer in self.layers:
            nn.init.zeros_(layer.weight[0].detach())
        self.inputs: dict[int, float] = {}
        self.grads: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            by, grad = self.inputs.get(i, 1.0), self.grads.get(i, 1.0)
            scaled = _with_grad(x * by, 1 / grad)
            x = x + _with_grad(layer(scaled), grad) / by
        return x


def _with_grad(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied by a factor."""
    return x * factor + (x - x * factor).detach()


UNSCALED = fp8.Recipe(
    name="unscaled",
    input=fp8.Cast(format="e4m3", scaling="unit", overflow="nonfinite"),
    weight=fp8.Cast(format="e4m3", scaling="unit", overflow="nonfinite"),
    grad=fp8.Cast(format="e5m2", scaling="unit", overflow="nonfinite"),
)
"""Without scales, and with overflow to NaN or Inf."""


class Case(NamedTuple):
    """inject: changes the network, and may change the batch; before or after the conversion. rules:
    what is named, as (layer, product)."""

    inject: Callable[[Network, Tensor], Tensor | None]
    rules: list[tuple[int, str | None]]
    recipe: Any = UNSCALED
    is_late: bool = False


def _large_weight(*which: int, value: float = 1e4) -> Callable[[Network, Tensor], None]:
    """One weight above 448, whose input is zero. With one scale for the tensor, it makes all other
    weights zero."""

    def inject(network: Network, x: Tensor) -> None:
        for i in which:
            with torch.no_grad():
                network.layers[i].weight[3, 0] = value

    return inject


def _large(field: str, i: int, value: float) -> Callable[[Network, Tensor], None]:
    """The inputs or gradients of a layer."""
    return lambda network, x: getattr(network, field).update({i: value})


def _stuck(i: int) -> Callable[[Network, Tensor], None]:
    """A static scale that was measured when inputs were 2**11 times smaller, and saturates them."""
    return lambda network, x: network.layers[i].fp8_scale_input.mul_(2.0**-11) and None


def _nothing(network: Network, x: Tensor) -> None:
    """Not a fault."""


# The gradient of the batch is not computed: casts of the first layer's second product do not run.
WEIGHTS, GRADS = ["forward.weight", *["weight"] * 3], ["grad_weight.grad", *["grad"] * 3]
CASES = {
    **{f"weight of layer {i}": Case(_large_weight(i), [(i, WEIGHTS[i])]) for i in range(4)},
    **{
        f"weights of layers {which}": Case(_large_weight(*which), [(i, WEIGHTS[i]) for i in which])
        for which in [(1, 3), (0, 2), (0, 1, 2, 3)]
    },
    **{f"input of layer {i}": Case(_large("inputs", i, 1e4), [(i, "input")]) for i in range(4)},
    **{f"gradient of layer {i}": Case(_large("grads", i, 1e9), [(i, GRADS[i])]) for i in range(4)},
    **{
        f"heavy tail of layer {i}": Case(
            _large_weight(i, value=1e9), [(i, "forward.weight")], "tensor"
        )
        for i in range(4)
    },
    **{
        f"stuck scale of layer {i}": Case(_stuck(i), [(i, "input")], "static", is_late=True)
        for i in range(4)
    },
    **{
        f"an unlucky batch under {recipe}": Case(lambda network, x: 100 * x, [], recipe)
        for recipe in ("tensor", "row", "mxfp8")
    },
    "a batch with Inf": Case(lambda network, x: x.index_fill(0, torch.tensor(0), math.inf), []),
    "no scales, no fault": Case(_nothing, []),
    "scales of blocks, no fault": Case(_nothing, [], "mxfp8"),
    "static scales, no fault": Case(_nothing, [], "static"),
}
"""Thirty."""


def network() -> tuple[Network, Tensor]:
    torch.manual_seed(0)
    return Network(), torch.randn(32, WIDTH).index_fill(1, torch.tensor(0), 0.0)


def near(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A loss of about 0.09: its targets are near to what the model computes."""
    with torch.no_grad():
        target = model(x) + 0.3 * torch.randn(x.shape)
    return lambda y: (y - target).square().mean()


def named(result: Blame) -> list[tuple[int, str | None]]:
    return sorted((int(r.layers.removeprefix("layers.")), r.product) for r in result.rules)


def test_there_are_thirty():
    assert len(CASES) == 30


@pytest.mark.parametrize("name", CASES)
def test_the_casts_at_fault_are_named(name: str):
    """Of models that are converted, and of every second one in high precision, with a policy."""
    case = CASES[name]
    converts = case.is_late or list(CASES).index(name) % 2 == 0
    model, x = network()
    changed = None if case.is_late else case.inject(model, x)
    loss, x = near(model, x), x if changed is None else changed
    if converts:
        with quiet():
            fp8.convert(model, case.recipe, backend="simulate")
        if case.recipe == "static":
            fp8.calibrate(model, x, loss=loss)
    if case.is_late:
        case.inject(model, x)
    result = fp8.blame(model, x, loss, policy=None if converts else case.recipe)
    assert named(result) == case.rules
    if case.rules:
        assert result.repaired is not None
        assert all(map(math.isfinite, result.repaired.judged))
        assert str(result).startswith("Low precision: the fault is gone with ")
        assert f"('layers.{case.rules[0][0]}', {case.rules[0][1]!r}, None)" in str(result)
    else:
        assert result.repaired is None
        assert str(result).startswith("Not low precision")


def test_a_fault_that_only_the_next_loss_shows():
    """Gradients below the smallest number of the format are lost, and the step with them: of a
    batch of unit vectors, a step moves each output by its own gradient."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), torch.eye(WIDTH)
    target = torch.randint(-4, 5, (WIDTH, WIDTH)) / 4

    def loss(y: Tensor) -> Tensor:
        return 1e-8 * (y - target).square().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.4e8)
    with quiet():
        fp8.convert(model, UNSCALED, backend="simulate")
    before = model[0].weight.detach().clone()
    assert fp8.blame(model, x, loss=loss).rules == ()
    result = fp8.blame(model, x, loss=loss, optimizer=optimizer)
    assert [(r.layers, r.product) for r in result.rules] == [("0", "grad_weight.grad")]
    assert result.low.loss_after > 2 * result.high.loss_after
    assert "loss after it" in str(result)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None


TOGETHER = ["nvfp4", "quartet2", "tetrajet2"]
"""Recipes that rotate both operands of a product."""


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("name", TOGETHER)
def test_operands_that_are_rotated_alike_are_named_together(name: str, layer: int):
    """A gradient above 448 in the weight's product, and a weight where nothing is rotated."""
    recipe = fp8.RECIPES[name]
    how = recipe.grad_weight[0]
    plain: dict[str, Any] = {"format": "e4m3", "scaling": "unit", "overflow": "nonfinite"}
    turned = fp8.Cast(**plain, hadamard=how.hadamard, signs=how.signs)
    again = {"grad_weight_grad": turned, "grad_weight_input": turned}
    casts = {"weight": fp8.Cast(**plain), "grad_input_weight": recipe.grad_input[1]}
    model, x = network()
    loss = near(model, x)
    with quiet():
        fp8.convert(model, dataclasses.replace(recipe, **casts, **again), backend="simulate")
    _large("grads", layer, 1e9)(model, x)
    assert named(fp8.blame(model, x, loss)) == [(layer, "grad_weight")]
    other = (layer + 1) % LAYERS
    _large_weight(other)(model, x)
    result = fp8.blame(model, x, loss)
    assert named(result) == sorted([(layer, "grad_weight"), (other, "forward.weight")])
    assert result.repaired is not None
    assert all(map(math.isfinite, result.repaired.judged))


@pytest.mark.parametrize("recipe", ["nvfp4_nvidia", "four_over_six", *TOGETHER])
def test_recipes_of_four_bits_as_they_are(recipe: str):
    """The sum of gradients of random casts is no fault that a bisection has to find exactly."""
    model, x = network()
    with quiet():
        fp8.convert(model, recipe, backend="simulate")
    result = fp8.blame(model, x, near(model, x), threshold=1 + 1e-6)
    assert result.low != result.high
    assert bool(result.rules) == (result.repaired is not None)
    if result.rules:
        fp8.override(model, *result.rules)


@pytest.mark.parametrize("recipe", fp8.RECIPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_parts_of_a_layer_have_a_recipe_alone_and_together(recipe: str, name: str):
    """Every part, every union of parts, and no smaller part that includes the casts."""
    replay: Any = SimpleNamespace(layers={"0": fp8.RECIPES[recipe]})
    whole = _Part("0", frozenset(range(6)))
    singles = _split(replay, whole, [frozenset([cast]) for cast in range(6)])
    products = _split(replay, whole, [frozenset(LayerRule("*", product=name).casts)])
    model = fp8.convert(nn.Sequential(nn.Linear(16, 16)), recipe, backend="simulate")
    for count in (1, 2, 3):
        for parts in combinations([*singles, *products], count):
            fp8.override(model, *_joined(parts))
    assert frozenset().union(*[part.casts for part in singles]) == whole.casts
    for part in singles:
        for inner in combinations(part.casts, len(part.casts) - 1):
            if inner and frozenset(inner) not in {p.casts for p in singles}:
                with pytest.raises(ValueError, match=r"rotated alike|one history"):
                    fp8.override(model, *_joined([_Part("0", frozenset(inner))]))


@pytest.mark.parametrize("recipe", TOGETHER)
def test_replays_have_equal_dropout_masks_where_casts_are_random(recipe: str):
    seen: list[Tensor] = []

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                seen.append(nn.functional.dropout(torch.ones_like(x)))
                x = torch.tanh(layer(x * seen[-1]))
            return x

    torch.manual_seed(0)
    how = fp8.Cast(format="e2m1", scaling="tensor", rounding="stochastic")
    forward = dataclasses.replace(fp8.RECIPES[recipe], input=how, weight=how)
    model = fp8.convert(Dropping(), forward, backend="simulate")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = fp8.blame(model, torch.randn(8, 32), lambda y: y.square().mean(), optimizer=optimizer)
    assert len(seen) == 6 * result.replays > 6
    for i, mask in enumerate(seen):
        assert torch.equal(mask, seen[i % 6])


def test_nothing_of_the_users_changes():
    """Nor buffers, gradients, or the states of random number generators."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())
    fp8.convert(model, "delayed", backend="simulate")
    before = copy.deepcopy(model.state_dict())
    x, state = torch.randn(8, WIDTH), torch.get_rng_state()
    assert fp8.blame(model, x, loss=lambda y: y.square().mean()).rules == ()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Wrapping(torch.optim.Optimizer):
    """Steps by an optimizer that it wraps, which torch leaves out of copies."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_optimizers_with_attributes_and_losses_with_weights_are_copied_whole():
    model = fp8.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "tensor", backend="simulate")
    loss, x = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0)), torch.randn(1, WIDTH)
    optimizer = Wrapping([*model.parameters(), *loss.parameters()])
    before = copy.deepcopy(loss.state_dict())
    first = fp8.blame(model, x, loss, optimizer=optimizer).low
    assert all(parameter.grad is None for parameter in loss.parameters())
    assert all(torch.equal(before[name], value) for name, value in loss.state_dict().items())
    for parameter in loss.parameters():
        parameter.grad = torch.full_like(parameter, 9.0)  # of a step before
    assert fp8.blame(model, x, loss, optimizer=optimizer).low == first


@pytest.mark.parametrize("seed", range(6))
def test_a_smallest_set_in_few_tries(seed: int):
    """k of n parts take 1 + k (1 + log2 n) tries."""
    draw = torch.Generator().manual_seed(seed)
    n, k = 64, 1 + seed % 3
    wanted = set(torch.randperm(n, generator=draw)[:k].tolist())
    tries = []

    def repairs(parts: Any) -> bool:
        tries.append(list(parts))
        return wanted <= set(parts)

    assert _smallest(list(range(n)), repairs) == sorted(wanted)
    assert len(tries) <= 1 + k * (1 + math.log2(n))
    assert _smallest([1, 2], lambda parts: False) is None


WRONG = {
    "no layer of the model is converted": (Network, {}),
    "threshold must be above 1": (Network, {"policy": "tensor", "threshold": 1.0}),
    "the model returns it, or loss=": (
        lambda: nn.Linear(WIDTH, WIDTH),
        {"policy": "tensor", "loss": None},
    ),
    "does not depend on a parameter": (
        lambda: Network().requires_grad_(False),
        {"policy": "tensor"},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_input(message: str):
    make, arguments = WRONG[message]
    with pytest.raises(ValueError, match=message):
        fp8.blame(make(), torch.ones(2, WIDTH), **{"loss": lambda y: y.sum(), **arguments})
    with pytest.raises(TypeError, match=r"needs an nn\.Module"):
        fp8.blame(3, torch.ones(2))
