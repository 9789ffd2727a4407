"""Recipes that keep scales between passes, in models that call `torch.func` transforms."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap

import fp8
from tests.shared import Net, filterwarnings, normal, parametrize, randn, refuses


def inner(net):
    return lambda x: net.second(torch.tanh(net.first(x)))


def squared(net):
    return lambda x: inner(net)(x).square().sum()


def adapted(net, x):
    """The second layer with the gradients of the first as weights."""
    weights = dict(net.first.named_parameters())
    found = grad(lambda w: functional_call(net.first, w, (x,)).square().mean())(weights)
    return functional_call(net.second, {k: found[k] for k in weights}, (x,))


MODELS = {
    "grad": lambda net, x: grad(squared(net))(x),
    "vmap": lambda net, x: vmap(inner(net))(x),
    "vmap of grad": lambda net, x: vmap(grad(squared(net)))(x),
    "jacrev": lambda net, x: jacrev(inner(net))(x[0]),
    "functional_call": adapted,
}
each_model = parametrize("name", MODELS)


def converted(name, recipe):
    """Two layers, of which a function of the input is made."""
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    return fp8.convert(Net(MODELS[name], **layers), recipe)


@pytest.mark.vmap
@each_model
def test_what_would_be_stored_is_refused_by_name(name):
    x = normal(4, 8)
    refused = refuses("under a transform of torch", NotImplementedError)
    with refused:
        fp8.calibrate(converted(name, "static"), x)
    for recipe in ("static", "delayed"):
        with refused:
            converted(name, recipe)(x)


@pytest.mark.vmap
@each_model
@filterwarnings(
    "ignore:There is a performance drop", "ignore::fp8.warnings.RecipeWarning"
)
def test_scales_that_are_set_are_used(name):
    model, x = converted(name, "static"), normal(4, 8)
    scales = dict.fromkeys(fp8.calibration(model), 0)
    fp8.calibrate(model, scales=scales, freeze=True)
    expected = fp8.convert(fp8.revert(copy.deepcopy(model)), "unit")
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, expected(x))
    assert set(fp8.calibration(model).values()) == {0}


@parametrize("recipe", "unit tensor row bf16".split())
@filterwarnings("ignore::fp8.warnings.RecipeWarning")
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


@parametrize("recipe", ["tensor", "row", "static"])
def test_a_training_loop_of_torch_func(recipe):
    """Each call ends the pass before it, of which eager calls have written statistics."""
    model = fp8.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), recipe)
    x, parameters = normal(4, 8), dict(model.named_parameters())

    def loss(parameters):
        return functional_call(model, parameters, (x,)).square().mean()

    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        for _ in range(2):
            found = grad(loss)(parameters)
            for name, parameter in parameters.items():
                assert torch.equal(found[name], parameter.grad), name
