"""Transformed models under torch.func, exported, and differentiated twice: they work or refuse."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tests.transforms.models import KINDS, batch, gpt
from unit_scaling.transforms import unit_scale

# torch's compiler makes an instance of every autograd.Function it meets, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return unit_scale(KINDS["MLP"].make().double())


@pytest.fixture
def x() -> Tensor:
    return KINDS["MLP"].batch()


def test_parameters_written_past_the_module_keep_the_plan_and_the_mark(model: nn.Module, x: Tensor):
    expected = copy.deepcopy(model)(x)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(parameter.detach().clone())
    assert any("unit_scaled" in key for key in model.state_dict())
    assert torch.equal(model(x), expected)


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "functional_call": lambda m, x: functional_call(
        m, {n: p.clone() for n, p in m.named_parameters()}, (x,)
    ),
    "vmap": lambda m, x: vmap(m)(x),
    "export": lambda m, x: torch.export.export(m, (x,)).module()(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_first_call_is_refused(name: str, model: nn.Module, x: Tensor):
    """It would change the weights of the model, and not those that stand for them."""
    with pytest.raises(RuntimeError, match="once before"):
        CALLS[name](model, x)
    expected = model(x)
    torch.testing.assert_close(CALLS[name](model, x), expected)


def test_a_model_of_two_inputs_and_results_is_exported():
    model = unit_scale(gpt())
    expected = model(*batch())
    program = torch.export.export(model, batch())
    torch.testing.assert_close(program.module()(*batch()), expected)
