"""`fp8.blame` of injected faults: it names the casts, and nothing where casts are not at fault."""

import dataclasses
import math
from collections import namedtuple

import torch
from torch import nn

import fp8
from fp8.casts.watch import watch_of
from fp8.lab.blame import _smallest
from fp8.lab.trace import quiet
from tests.shared import parametrize, refuses, sampled, seeded

WIDTH, LAYERS = 16, 4


class Network(nn.Module):
    """Layers on a residual stream whose feature 0 is always zero.

    inputs: layer -> what its input is multiplied by, and its output divided by. grads: layer ->
    what the gradient of its output is multiplied by, and that of its input divided by.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)
        )
        for layer in self.layers:
            nn.init.zeros_(layer.weight[0].detach())
        self.inputs = {}
        self.grads = {}

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            by, grad = self.inputs.get(i, 1.0), self.grads.get(i, 1.0)
            scaled = _with_grad(x * by, 1 / grad)
            x = x + _with_grad(layer(scaled), grad) / by
        return x


def _with_grad(x, factor):
    """x, whose gradient is multiplied by a factor."""
    return x * factor + (x - x * factor).detach()


UNSCALED = fp8.Recipe(
    name="unscaled",
    input=fp8.Cast(format="e4m3", scaling="unit", overflow="nonfinite"),
    weight=fp8.Cast(format="e4m3", scaling="unit", overflow="nonfinite"),
    grad=fp8.Cast(format="e5m2", scaling="unit", overflow="nonfinite"),
)
"""Without scales, and with overflow to NaN or Inf."""


Case = namedtuple("Case", "inject rules recipe is_late", defaults=(UNSCALED, False))
"""inject: changes the network, and may change the batch; before or after the conversion.
rules: what is named, as (layer, product)."""


def _large_weight(*which, value=1e4):
    """One weight above 448, whose input is zero. With one scale for the tensor, it makes all other
    weights zero."""

    def inject(network, x):
        for i in which:
            with torch.no_grad():
                network.layers[i].weight[3, 0] = value

    return inject


def _large(field, i, value):
    """The inputs or gradients of a layer."""
    return lambda network, x: getattr(network, field).update({i: value})


def _stuck(i):
    """A static scale that was measured when inputs were 2**11 times smaller, and saturates them."""

    def stuck(network, x):
        watch_of(network).frozen = True
        network.layers[i].fp8_scale_input.mul_(2.0**-11)

    return stuck


def _nothing(network, x):
    """Not a fault."""


# The gradient of the batch is not computed: casts of the first layer's second product do not run.
WEIGHTS = ["forward.weight", *["weight"] * 3]
GRADS = ["grad_weight.grad", *["grad"] * 3]


def _of_layer(i):
    """Faults of one layer."""
    tail = _large_weight(i, value=1e9)
    return {
        "weight": Case(_large_weight(i), [(i, WEIGHTS[i])]),
        "input": Case(_large("inputs", i, 1e4), [(i, "input")]),
        "gradient": Case(_large("grads", i, 1e9), [(i, GRADS[i])]),
        "heavy tail": Case(tail, [(i, "forward.weight")], "tensor"),
        "stuck scale": Case(_stuck(i), [(i, "input")], "static", is_late=True),
    }


CASES = {
    f"{name} of layer {i}": case
    for i in range(4)
    for name, case in _of_layer(i).items()
}
for which in ((1, 3), (0, 2), (0, 1, 2, 3)):
    rules = [(i, WEIGHTS[i]) for i in which]
    CASES[f"weights of layers {which}"] = Case(_large_weight(*which), rules)
for recipe in ("tensor", "row", "mxfp8"):
    unlucky = Case(lambda network, x: 100 * x, [], recipe)
    CASES[f"an unlucky batch under {recipe}"] = unlucky
CASES |= {
    "a batch with Inf": Case(
        lambda network, x: x.index_fill(0, torch.tensor(0), math.inf), []
    ),
    "no scales, no fault": Case(_nothing, []),
    "scales of blocks, no fault": Case(_nothing, [], "mxfp8"),
    "static scales, no fault": Case(_nothing, [], "static"),
}
"""Thirty."""


def network():
    torch.manual_seed(0)
    return Network(), torch.randn(32, WIDTH).index_fill(1, torch.tensor(0), 0.0)


def near(model, x):
    """A loss of about 0.09: its targets are near to what the model computes."""
    with torch.no_grad():
        target = model(x) + 0.3 * torch.randn(x.shape)
    return lambda y: (y - target).square().mean()


def named(result):
    return sorted(
        (int(r.layers.removeprefix("layers.")), r.product) for r in result.rules
    )


@sampled(3)
@parametrize("name", CASES)
def test_the_casts_at_fault_are_named(name):
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
        layer, product = case.rules[0]
        assert f"('layers.{layer}', {product!r}, None)" in str(result)
    else:
        assert result.repaired is None
        assert str(result).startswith("Not low precision")


def test_a_fault_that_only_the_next_loss_shows():
    """Gradients below the smallest number of the format are lost, and the step with them: of a
    batch of unit vectors, a step moves each output by its own gradient."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), torch.eye(WIDTH)
    target = torch.randint(-4, 5, (WIDTH, WIDTH)) / 4

    def loss(y):
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


@sampled(3)
@parametrize("layer", range(LAYERS))
@parametrize("name", TOGETHER)
def test_operands_that_are_rotated_alike_are_named_together(name, layer):
    """A gradient above 448 in the weight's product, and a weight where nothing is rotated."""
    recipe = fp8.RECIPES[name]
    how = recipe.grad_weight[0]
    plain = {"format": "e4m3", "scaling": "unit", "overflow": "nonfinite"}
    turned = fp8.Cast(**plain, hadamard=how.hadamard, signs=how.signs)
    again = {"grad_weight_grad": turned, "grad_weight_input": turned}
    casts = {"weight": fp8.Cast(**plain), "grad_input_weight": recipe.grad_input[1]}
    model, x = network()
    loss = near(model, x)
    recipe = dataclasses.replace(recipe, **casts, **again)
    with quiet():
        fp8.convert(model, recipe, backend="simulate")
    _large("grads", layer, 1e9)(model, x)
    other = (layer + 1) % LAYERS
    _large_weight(other)(model, x)
    result = fp8.blame(model, x, loss)
    assert named(result) == sorted([(layer, "grad_weight"), (other, "forward.weight")])
    assert result.repaired is not None
    assert all(map(math.isfinite, result.repaired.judged))


@parametrize("seed", range(6))
def test_a_smallest_set_in_few_tries(seed):
    """k of n parts take 1 + k (1 + log2 n) tries."""
    draw = seeded(seed)
    n, k = 64, 1 + seed % 3
    wanted = set(torch.randperm(n, generator=draw)[:k].tolist())
    tries = []

    def repairs(parts):
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


@parametrize("message", WRONG)
def test_bad_input(message):
    make, arguments = WRONG[message]
    given = {"loss": torch.sum} | arguments
    with refuses(message):
        fp8.blame(make(), torch.ones(2, WIDTH), **given)
    with refuses(r"needs an nn\.Module", TypeError):
        fp8.blame(3, torch.ones(2))
