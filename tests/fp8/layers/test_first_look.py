"""The first backward pass under a recipe without scales warns of what its casts lose."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fp8
import unit_scaling.functional as U
from tests.shared import Net, linears, normal, parametrize, said, warns
from unit_scaling.transforms import simulate_fp8, unit_scale

TARGETS = torch.arange(64) % 32


def net():
    torch.manual_seed(0)
    up, down = nn.Linear(64, 128), nn.Linear(128, 32)
    return nn.Sequential(OrderedDict(up=up, act=nn.GELU(), down=down))


def batch(seed=0):
    return normal(64, 64, seed=seed)


def step(model, loss=nn.functional.cross_entropy, scale=2.0**-12, around=None):
    """A backward pass. scale: of the loss: plain models of a usual size have such gradients."""
    call = model if around is None else fp8.autocast(around)(model)
    (loss(call(batch()), TARGETS) * scale).backward()


def seen_in(run, times=3):
    with said(fp8.warnings.RecipeWarning) as messages:
        for _ in range(times):
            run()
    return messages


def converted(model, **options):
    return fp8.convert(model, "unit", **options)


WAYS = {
    "convert": lambda: (converted(net()), None),
    "native": lambda: (converted(net(), backend="native"), None),
    "simulate_fp8": lambda: (simulate_fp8(net()), None),
    "autocast": lambda: (net(), "unit"),
    "copy": lambda: (copy.deepcopy(converted(net())), None),
}


NATIVE = pytest.param("native", marks=pytest.mark.native)


@parametrize("way", ["convert", "simulate_fp8", "autocast", "copy", NATIVE])
def test_one_warning_names_layer_operand_share_and_recipe(way):
    model, around = WAYS[way]()
    (message,) = seen_in(lambda: step(model, around=around))
    names = {"autocast": "linear 2 (weight (32, 128))"}
    name = names.get(way, "'down'")
    assert f"of the grad of {name} become zero in e5m2" in message
    assert 90 < int(message.partition("%")[0]) <= 100
    assert 'recipe "tensor" has a scale' in message


@parametrize("operand", ["input", "weight", "saturated"])
def test_the_operands_of_the_forward_pass_are_looked_at(operand):
    layer, x = nn.Linear(64, 64, bias=False), torch.randn(64, 64)
    with torch.no_grad():
        layer.weight.normal_()
    if operand == "weight":
        with torch.no_grad():
            layer.weight.mul_(2e-3)
    else:
        x *= 1e-4 if operand == "input" else 1e4

    def run():
        with fp8.autocast("unit"):
            y = layer(x)
        y.backward(torch.randn(64, 64))

    (message,) = seen_in(run)
    what = "saturate" if operand == "saturated" else "become zero"
    name = "input" if operand == "saturated" else operand
    assert f"of the {name} of linear 1 (weight (64, 64)) {what} in e4m3" in message


def test_what_loses_nothing_or_is_too_little_to_tell_is_silent():
    scaled, dynamic, plain = simulate_fp8(unit_scale(net())), fp8.convert(net()), net()
    model, layer, x = converted(net()), nn.Linear(8, 8), 1e-6 * torch.randn(8, 8)
    for run in (
        lambda: step(scaled, U.cross_entropy, scale=1.0),
        lambda: step(dynamic),
        lambda: (1e-9 * fp8.autocast("unit")(layer)(x)).sum().backward(),
        lambda: step(plain, lambda y, _: (0 * y).sum(), around="unit"),
        lambda: torch.no_grad()(model)(batch()),
    ):
        assert not seen_in(run)
    assert len(seen_in(lambda: step(model))) == 1  # it was not used up


def scaled_to_one():
    """A layer scale, which keeps the gradients of its branch small at first."""
    torch.manual_seed(0)
    gain = Net(lambda m, x: m.value * x, value=nn.Parameter(torch.tensor(1e-6)))
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), gain)


@parametrize("way", ["static", "unit_scale"])
def test_static_scales_are_looked_at_again(way):
    """The gradients of a model with a small layer scale grow by orders of magnitude."""
    model = scaled_to_one()
    if way == "static":
        model = fp8.convert(model, "static")
        fp8.calibrate(model, batch(), torch.sum)
    else:
        model = simulate_fp8(unit_scale(model))
    summed(model, steps=1)
    with torch.no_grad():
        model[2].value.fill_(1.0)
    with warns(
        r"\d% of the grad of '[01]' saturate in e5m2", fp8.warnings.ScaleWarning
    ):
        summed(model, steps=8)
    fp8.calibrate(model, batch(), torch.sum)
    summed(model, steps=8)


def summed(model, steps):
    for _ in range(steps):
        model(batch()).sum().backward()


def test_compiled_code_does_not_look():
    model = net()

    @torch.compile(backend="eager", fullgraph=True)
    def run(x):
        with fp8.autocast("unit"):
            return model(x)

    assert not seen_in(
        lambda: (nn.functional.cross_entropy(run(batch()), TARGETS) * 1e-6).backward()
    )


@parametrize("factor", [1.0, 2.0**16])
def test_a_loss_that_is_not_the_calibrated_one_is_named(factor):
    """A GradScaler multiplies the loss, and fp8.calibrate was called without it."""
    model = linears(64, 128, nn.GELU, 64)
    x = torch.randn(128, 64)
    fp8.convert(model, "static")
    fp8.calibrate(model, x, loss=lambda y: y.square().mean())
    with said() as found:
        (factor * model(x).square().mean()).backward()
    assert bool(found) == (factor != 1)
    assert all("% of the grad of " in text and "GradScaler" in text for text in found)
