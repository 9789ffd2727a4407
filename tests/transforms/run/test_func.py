"""Transformed models under torch.func, exported, and differentiated twice: they work or refuse."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from tests.transforms.gradients import check_true
from tests.transforms.models import Net, batch, gpt
from unit_scaling.transforms import unit_scale

# torch's compiler makes an instance of every autograd.Function it meets, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def residual(m: Any, x: Tensor) -> Tensor:
    x = m.embed(x)
    return m.head(x + m.branch(F.gelu(F.layer_norm(x, (16,)))))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embed": (8, 16), "branch": (16, 16), "head": (16, 4)}
    plain = Net(residual, **{name: nn.Linear(*size) for name, size in sizes.items()})
    return unit_scale(plain).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_parameters_written_past_the_module_keep_the_plan_and_the_mark(model: nn.Module, x: Tensor):
    expected = copy.deepcopy(model)(x)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(parameter.detach().clone())
    assert any("unit_scaled" in key for key in model.state_dict())
    assert torch.equal(model(x), expected)


def test_a_first_functional_call_is_refused(model: nn.Module, x: Tensor):
    """It would change the weights of the model, and not those that stand for them."""
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"once before torch\.func\.functional_call"):
        functional_call(model, parameters, (x,))
    expected = model(x)
    assert torch.equal(functional_call(model, parameters, (x,)), expected)


def test_vmap_gives_each_example_its_own_gradient(model: nn.Module, x: Tensor):
    parameters = dict(model.named_parameters())

    def one(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x,)).square().sum()

    with pytest.raises(RuntimeError, match="call the model once before"):
        vmap(model)(x)
    model(x[0])
    grads = vmap(grad(one), (None, 0))(parameters, x)
    for i, each in enumerate(x):
        expected = grad(one)(parameters, each)
        torch.testing.assert_close({name: g[i] for name, g in grads.items()}, expected)
    torch.testing.assert_close(vmap(model)(x), torch.stack([model(each) for each in x]))


def test_exports_once_it_has_run(model: nn.Module, x: Tensor):
    for each, args in ((model, (x,)), (unit_scale(gpt()), batch())):
        with pytest.raises(RuntimeError, match="call the model once before"):
            torch.export.export(each, args)
        expected = each(*args)
        program = torch.export.export(each, args)
        torch.testing.assert_close(program.module()(*args), expected)


def adapted(m: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Adapts its weights to each task of a batch by a step of gradient descent."""

    def task(x: Tensor, y: Tensor) -> Tensor:
        def error(weights: dict[str, Tensor]) -> Tensor:
            return F.mse_loss(functional_call(m.net, weights, (x,)), y)

        weights = dict(m.net.named_parameters())
        slopes = grad(error)(weights)
        return error({name: w - 0.1 * slopes[name] for name, w in weights.items()})

    return vmap(task)(*batch).mean()


def test_a_model_may_take_gradients_of_its_own():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    plain = Net(adapted, net=net).double()
    tasks = torch.randn(5, 16, 4).double(), torch.randn(5, 16, 2).double()
    model = unit_scale(plain)
    model(tasks)
    check_true(model, lambda model: model(tasks))
    assert torch.equal(unit_scale(plain, init="preserve")(tasks), plain(tasks))
