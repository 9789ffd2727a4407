"""Transformed models with control flow and regions, whose functions torch runs outside of modes."""

import copy

import pytest
import torch
from torch import nn

from tests.transforms.models import Net
from unit_scaling.transforms import simulate_fp8, unit_scale


def part(m, x):
    return m.second(torch.relu(m.first(x)))


@torch.compiler.nested_compile_region
def region(m, x):
    return part(m, x)


def conditional(m, x):
    return torch.cond(x.sum() > -1e9, lambda x: part(m, x), lambda x: part(m, x) * 2, (x,))


TRANSFORMS = {
    "unit_scale": unit_scale,
    "preserve": lambda model: unit_scale(model, init="preserve"),
    "simulate_fp8": simulate_fp8,
    "both": lambda model: simulate_fp8(unit_scale(model)),
}
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def results(call):
    y = call(X)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), X)]


def transformed(name, kind):
    torch.manual_seed(0)
    model = TRANSFORMS[name](Net(kind, first=nn.Linear(16, 16), second=nn.Linear(16, 16)))
    results(model)
    return model


@pytest.mark.parametrize("kind", [conditional, region])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_eager(name, kind):
    torch.testing.assert_close(results(transformed(name, kind)), results(transformed(name, part)))


@pytest.mark.parametrize(
    ("name", "kind"), [("simulate_fp8", conditional), *((name, region) for name in TRANSFORMS)]
)
def test_compiled(name, kind):
    model = transformed(name, kind)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled), results(model))


def test_a_plan_is_not_followed_through_control_flow_of_a_graph():
    model = transformed("unit_scale", conditional)
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError, match="follow the plan"):
        torch.compile(model, backend="eager")(X)
