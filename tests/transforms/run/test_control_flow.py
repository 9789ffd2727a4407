"""Transformed models with control flow and regions, whose functions torch runs outside of modes."""

import copy

import pytest
import torch
from torch import nn

from unit_scaling.transforms import simulate_fp8, unit_scale


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def part(self, x):
        return self.second(torch.relu(self.first(x)))

    def forward(self, x):
        return self.part(x)


class Conditional(Plain):
    def forward(self, x):
        return torch.cond(x.sum() > -1e9, self.part, lambda x: self.part(x) * 2, (x,))


class Region(Plain):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.part(x)


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
    model = TRANSFORMS[name](kind())
    results(model)
    return model


@pytest.mark.parametrize("kind", [Conditional, Region])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_eager(name, kind):
    torch.testing.assert_close(results(transformed(name, kind)), results(transformed(name, Plain)))


@pytest.mark.parametrize(
    ("name", "kind"), [("simulate_fp8", Conditional), *((name, Region) for name in TRANSFORMS)]
)
def test_compiled(name, kind):
    model = transformed(name, kind)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled), results(model))


def test_a_plan_is_not_followed_through_control_flow_of_a_graph():
    model = transformed("unit_scale", Conditional)
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError, match="follow the plan"):
        torch.compile(model, backend="eager")(X)
