"""Transformed models under torch.func, exported, and differentiated twice: they work or refuse."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from tests.transforms.gradients import check_true
from tests.transforms.models import batch, gpt
from unit_scaling.transforms import unit_scale

# torch's compiler makes an instance of every autograd.Function it meets, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.branch, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.branch(F.gelu(F.layer_norm(x, (16,)))))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return unit_scale(Residual()).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("calls", [0, 1])
def test_a_plan_made_in_a_functional_call_is_that_of_the_model(
    model: nn.Module, x: Tensor, calls: int
):
    other = copy.deepcopy(model)
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(calls):
        model(x).square().sum().backward()
    found = functional_call(model, parameters, (x,))
    assert torch.equal(found, other(x))
    assert torch.equal(model(x), other(x))


def test_parameters_written_past_the_module_keep_the_plan_and_the_mark(model: nn.Module, x: Tensor):
    expected = copy.deepcopy(model)(x)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(parameter.detach().clone())
    assert any("unit_scaled" in key for key in model.state_dict())
    assert torch.equal(model(x), expected)


def test_a_first_functional_call_that_would_change_tags_is_refused(x: Tensor):
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())

    model = unit_scale(Early()).double()
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="once before torch"):
        functional_call(model, parameters, (x,))


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


def test_exports_once_it_has_run(x: Tensor):
    torch.manual_seed(0)
    for model, args in ((unit_scale(Residual()), (x.float(),)), (unit_scale(gpt()), batch())):
        with pytest.raises(RuntimeError, match="call the model once before"):
            torch.export.export(model, args)
        expected = model(*args)
        program = torch.export.export(model, args)
        torch.testing.assert_close(program.module()(*args), expected)


class Adapted(nn.Module):
    """Adapts its weights to each task of a batch by a step of gradient descent."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def task(x: Tensor, y: Tensor) -> Tensor:
            def error(weights: dict[str, Tensor]) -> Tensor:
                return F.mse_loss(functional_call(self.net, weights, (x,)), y)

            weights = dict(self.net.named_parameters())
            slopes = grad(error)(weights)
            return error({name: w - 0.1 * slopes[name] for name, w in weights.items()})

        return vmap(task)(x, y).mean()


def test_a_model_may_take_gradients_of_its_own():
    torch.manual_seed(0)
    plain = Adapted().double()
    x, y = torch.randn(5, 16, 4).double(), torch.randn(5, 16, 2).double()
    model = unit_scale(plain)
    model(x, y)
    check_true(model, lambda model: model(x, y))
    assert torch.equal(unit_scale(plain, init="preserve")(x, y), plain(x, y))
