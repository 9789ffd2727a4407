"""`fp8.blame` of injected faults: it names the casts, and nothing where casts are not at fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8.lab.blame import Blame, _smallest
from fp8.lab.preflight.update_error import quiet

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
    """inject: changes the network, and may change the batch. rules: what is named, as (layer,
    product)."""

    inject: Callable[[Network, Tensor], Tensor | None]
    rules: list[tuple[int, str | None]]
    recipe: Any = UNSCALED


def _large_weight(*which: int) -> Callable[[Network, Tensor], None]:
    """One weight above 448, whose input is zero."""

    def inject(network: Network, x: Tensor) -> None:
        for i in which:
            with torch.no_grad():
                network.layers[i].weight[3, 0] = 1e4

    return inject


def _large_input(i: int) -> Callable[[Network, Tensor], None]:
    return lambda network, x: network.inputs.update({i: 1e4})


def _large_grad(i: int) -> Callable[[Network, Tensor], None]:
    return lambda network, x: network.grads.update({i: 1e9})


def _heavy_tail(i: int) -> Callable[[Network, Tensor], None]:
    """One scale for the tensor makes all weights but one zero; that one has an input of zero."""

    def inject(network: Network, x: Tensor) -> None:
        with torch.no_grad():
            network.layers[i].weight[3, 0] = 1e9

    return inject


# The gradient of the batch is not computed: casts of the first layer's second product do not run.
CASES = {
    "weight of the first layer": Case(_large_weight(0), [(0, "forward.weight")]),
    "weight of an inner layer": Case(_large_weight(2), [(2, "weight")]),
    "weight of the last layer": Case(_large_weight(3), [(3, "weight")]),
    "weights of two layers": Case(_large_weight(1, 3), [(1, "weight"), (3, "weight")]),
    "weights of all layers": Case(
        _large_weight(0, 1, 2, 3), [(0, "forward.weight"), *((i, "weight") for i in (1, 2, 3))]
    ),
    "input of the first layer": Case(_large_input(0), [(0, "input")]),
    "input of the last layer": Case(_large_input(3), [(3, "input")]),
    "gradient of the first layer": Case(_large_grad(0), [(0, "grad_weight.grad")]),
    "gradient of an inner layer": Case(_large_grad(1), [(1, "grad")]),
    "an unlucky batch": Case(lambda network, x: 100 * x, [], "tensor"),
    "a batch with Inf": Case(lambda network, x: x.index_fill(0, torch.tensor(0), math.inf), []),
    "no fault": Case(lambda network, x: None, []),
    "a heavy tail": Case(_heavy_tail(0), [(0, "forward.weight")], "tensor"),
    "scales of blocks": Case(lambda network, x: None, [], "mxfp8"),
}


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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("converted", [True, False], ids=["converted", "with a policy"])
def test_the_casts_at_fault_are_named(name: str, converted: bool):
    case = CASES[name]
    model, x = network()
    changed = case.inject(model, x)
    loss, x = near(model, x), x if changed is None else changed
    if converted:
        with quiet():
            fp8.convert(model, case.recipe, backend="simulate")
    result = fp8.blame(model, x, None if converted else case.recipe, loss=loss)
    assert named(result) == case.rules
    if case.rules:
        assert result.repaired is not None
        assert all(map(math.isfinite, result.repaired.judged))
        assert str(result).startswith("Low precision: the fault is gone with ")
        assert f"('layers.{case.rules[0][0]}', {case.rules[0][1]!r}, None)" in str(result)
    else:
        assert result.repaired is None
        assert str(result).startswith("Not low precision")


def test_a_static_scale_that_is_stuck():
    """It was measured when inputs were 2**12 times smaller, and saturates them now."""
    model, x = network()
    loss = near(model, x)
    fp8.convert(model, "static", backend="simulate")
    fp8.calibrate(model, x, loss=loss)
    model.layers[2].fp8_scale_input.mul_(2.0**-11)
    result = fp8.blame(model, x, loss=loss)
    assert named(result) == [(2, "input")]
    assert result.low.loss > 2 * result.high.loss


class Line(nn.Module):
    """A product with a batch of unit vectors: a step moves each output by its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_fault_that_only_the_next_loss_shows():
    """Gradients below the smallest number of the format are lost, and the step with them."""
    torch.manual_seed(0)
    model, x = Line(), torch.eye(WIDTH)
    target = torch.randint(-4, 5, (WIDTH, WIDTH)) / 4

    def loss(y: Tensor) -> Tensor:
        return 1e-8 * (y - target).square().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.4e8)
    with quiet():
        fp8.convert(model, UNSCALED, backend="simulate")
    before = model.layer.weight.detach().clone()
    assert fp8.blame(model, x, loss=loss).rules == ()
    result = fp8.blame(model, x, loss=loss, optimizer=optimizer)
    assert [(r.layers, r.product) for r in result.rules] == [("layer", "grad_weight.grad")]
    assert result.low.loss_after > 2 * result.high.loss_after
    assert "loss after it" in str(result)
    assert torch.equal(model.layer.weight, before)
    assert model.layer.weight.grad is None


def test_nothing_of_the_users_changes():
    """Nor buffers, gradients, or the states of random number generators."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())
    fp8.convert(model, "delayed", backend="simulate")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, state = torch.randn(8, WIDTH), torch.get_rng_state()
    result = fp8.blame(model, x, loss=lambda y: y.square().mean())
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert result.rules == ()


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
    "returns no loss": (lambda: nn.Linear(WIDTH, WIDTH), {"policy": "tensor", "loss": None}),
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
