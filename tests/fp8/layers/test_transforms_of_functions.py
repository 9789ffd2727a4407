"""Recipes that keep scales between passes, in models that call `torch.func` transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.nn import functional as F

import fp8
from tests.fp8.products.test_matmul import randn


class Net(nn.Module):
    """Two layers, of which ``apply`` makes a function of the input."""

    def __init__(self, apply: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.apply_to = nn.Linear(8, 8), nn.Linear(8, 8), apply

    def inner(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(self, x)


def adapted(net: Net, x: Tensor) -> Tensor:
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
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.mark.vmap
@each_model
def test_what_would_be_stored_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    x = randn(4, 8).detach()
    refused = pytest.raises(NotImplementedError, match="under a transform of torch")
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
def test_scales_that_are_set_are_used(name: str) -> None:
    torch.manual_seed(0)
    model, x = fp8.convert(Net(MODELS[name]), "static"), randn(4, 8).detach()
    fp8.calibrate(model, scales=dict.fromkeys(fp8.calibration(model), 0))
    expected = fp8.convert(fp8.revert(copy.deepcopy(model)), "unit")
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, expected(x))
    assert set(fp8.calibration(model).values()) == {0}


@pytest.mark.parametrize("recipe", ["unit", "tensor", "row", "bf16"])
@pytest.mark.filterwarnings("ignore::fp8.warnings.RecipeWarning")
def test_forward_mode_is_refused_without_gradients_too(recipe):
    """Where no backward pass is recorded, a cast is no autograd function, and loses the tangent."""
    layer, x = fp8.convert(nn.Linear(8, 8), recipe), randn(4, 8)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, REFUSED_FORWARD:
            jvp(layer, (x,), (x,))
        with context, REFUSED_FORWARD, forward_ad.dual_level():
            layer(forward_ad.make_dual(x, x))


REFUSED_FORWARD = pytest.raises(
    NotImplementedError, match=r"no forward mode AD .* and for a Hessian torch.func.jacrev"
)


@pytest.mark.vmap
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("recipe", ["tensor", "mxfp8"])
def test_a_hessian_is_refused_by_name_and_computed_by_two_jacobians(recipe):
    torch.manual_seed(0)
    model = fp8.convert(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)), recipe)
    call, x = lambda x: model(x).sum(), randn(32).detach()
    for refused in (hessian(call), jacfwd(call)):
        with REFUSED_FORWARD:
            refused(x)
    with fp8.autocast(recipe), REFUSED_FORWARD:
        hessian(lambda q: F.scaled_dot_product_attention(q, q, q).square().sum())(randn(1, 4, 32))
    expected = torch.autograd.functional.hessian(call, x)
    assert expected.any()
    torch.testing.assert_close(jacrev(jacrev(call))(x), expected)


@pytest.mark.vmap
@pytest.mark.parametrize("recipe", ["static", "tensor"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_models_that_are_stacked(recipe):
    """Each with its scales, which a training step has set, also in a model whose own are not set;
    with the gradients of each. Where one scale of one model is not set, it is refused."""
    make = lambda: fp8.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), recipe)  # noqa: E731
    torch.manual_seed(0)
    models, fresh, x = [make() for _ in range(3)], make(), randn(3, 5, 8).detach()
    for i, model in enumerate(models):
        (1e3**i * model(x[i])).sum().backward()
        model.zero_grad()
    parameters, buffers = stack_module_state(models)

    def call(parameters, buffers, x):
        return functional_call(fresh, (parameters, buffers), (x,))

    ys, zs = vmap(call)(parameters, buffers, x), [m(t) for m, t in zip(models, x, strict=True)]
    assert torch.equal(ys, torch.stack(zs))
    for i, z in enumerate(zs):
        (1e3**i * ys[i]).sum().backward(retain_graph=True)
        (1e3**i * z).sum().backward()
    for name, stack in parameters.items():
        assert torch.equal(stack.grad, torch.stack([m.get_parameter(name).grad for m in models]))
    if recipe == "static":
        buffers["0.fp8_scale_input"][1] = 0
        with pytest.raises(NotImplementedError, match="set static scales before"):
            vmap(call)(parameters, buffers, x)
