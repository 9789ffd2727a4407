"""Recipes that keep scales between passes, in models that call `torch.func` transforms."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap

import fp8
from tests.shared import normal, parametrize, randn, refuses


class Net(nn.Module):
    """Two layers, of which ``apply`` makes a function of the input."""

    def __init__(self, apply):
        super().__init__()
        self.first, self.second, self.apply_to = nn.Linear(8, 8), nn.Linear(8, 8), apply

    def inner(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return self.apply_to(self, x)


def adapted(net, x):
    """The second layer with the gradients of the first as weights."""
    weights = dict(net.first.named_parameters())
    found = grad(lambda w: functional_call(net.first, w, (x,)).square().mean())(weights)
    return functional_call(net.second, {k: found[k] for k in weights}, (x,))


MODELS = {
    "grad": lambda net, x: grad(lambda z: net.inner(z).square().sum())(x),
    "vmap": lambda net, x: vmap(net.inner)(x),
    "vmap of grad": lambda net, x: vmap(grad(lambda z: net.inner(z).square().sum()))(x),
    "jacrev": lambda net, x: jacrev(net.inner)(x[0]),
    "functional_call": adapted,
}
each_model = parametrize("name", MODELS)


@pytest.mark.vmap
@each_model
def test_what_would_be_stored_is_refused_by_name(name):
    x = normal(4, 8)
    refused = refuses("under a transform of torch", NotImplementedError)
    with refused:
        fp8.calibrate(fp8.convert(Net(MODELS[name]), "static"), x)
    for recipe in ("static", "delayed"):
        with refused:
            fp8.convert(Net(MODELS[name]), recipe)(x)


@pytest.mark.vmap
@each_model
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore::fp8.warnings.RecipeWarning"
)
def test_scales_that_are_set_are_used(name):
    model, x = fp8.convert(Net(MODELS[name]), "static"), normal(4, 8)
    scales = dict.fromkeys(fp8.calibration(model), 0)
    fp8.calibrate(model, scales=scales, freeze=True)
    expected = fp8.convert(fp8.revert(copy.deepcopy(model)), "unit")
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, expected(x))
    assert set(fp8.calibration(model).values()) == {0}


@parametrize("recipe", "unit tensor row bf16".split())
@pytest.mark.filterwarnings("ignore::fp8.warnings.RecipeWarning")
def test_forward_mode_is_refused_without_gradients_too(recipe):
    """Where no backward pass is recorded, a cast is no autograd function, and loses the tangent."""
    layer, x = fp8.convert(nn.Linear(8, 8), recipe), randn(4, 8)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, REFUSED_FORWARD:
            jvp(layer, (x,), (x,))
        with context, REFUSED_FORWARD, forward_ad.dual_level():
            layer(forward_ad.make_dual(x, x))


REFUSED_FORWARD = refuses(
    r"no forward mode AD .* and for a Hessian torch.func.jacrev", NotImplementedError
)
