"""What differs in compiled code, and functions that the compiler would hide from a plan."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from fp8.common.compiler import (
    compiled_as,
    eager_only,
    in_graph,
    is_differentiated_again,
    reads_values,
)
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

LATE = """
import torch
from torch import nn
from torch.nn import functional as F
listed = list(torch.overrides.get_overridable_functions()[F])
torch.compile(F.hardswish, backend="eager")(torch.ones(2))  # the compiler caches the list
import fp8
from unit_scaling.transforms import unit_scale
assert torch.overrides.get_overridable_functions()[F] == listed
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x):
        return self.b(F.hardswish(self.a(x)))
net, x = unit_scale(Net()), torch.randn(8, 16)
expected = net(x)
assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(x), expected)
assert F.hardswish in torch.overrides.get_overridable_functions()[F]
"""


@pytest.mark.parametrize("function", [F.hardsigmoid, F.hardswish, F.sigmoid, F.tanh])
def test_a_compiled_model_computes_them_by_its_plan(function) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    a, b = nn.Linear(16, 16), nn.Linear(16, 16)
    net, x = unit_scale(Net(lambda m, x: m.b(function(m.a(x))), a=a, b=b)), torch.randn(8, 16)
    expected = net(x)
    got = torch.compile(net, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(got, expected)


def test_torchs_list_changes_only_when_a_plan_is_compiled() -> None:
    subprocess.run([sys.executable, "-c", LATE], check=True)


# The decorators: each function below is called in eager code and in a graph.


@compiled_as(lambda x, more=1.0: x * 2 + more)
def chosen(x: Tensor, more: float = 1.0) -> Tensor:
    return x * 3 + more


@eager_only(-1.0)
def read(x: Tensor) -> float:
    return x.sum().item()


@partial(in_graph, graph=lambda x, scales: x * scales[0])
def opaque(x: Tensor, scales: tuple[float, ...]) -> Tensor:
    return x * scales[1]


@in_graph
def breaking(x: Tensor) -> Tensor:
    """The compiler cannot trace it, and need not."""
    sys._getframe()
    return x * 2


def all_of_them(x: Tensor) -> tuple[Any, ...]:
    return chosen(x, more=2.0), read(x), opaque(x, (5.0, 7.0)), breaking(x), reads_values(x)


def test_a_graph_computes_what_the_decorators_say() -> None:
    torch.compiler.reset()
    x = torch.arange(3.0)
    torch.testing.assert_close(all_of_them(x), (x * 3 + 2, 3.0, x * 7, x * 2, True))
    compiled = torch.compile(all_of_them, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), (x * 2 + 2, -1.0, x * 5, x * 2, False))
    assert chosen.__name__ == "chosen"


def test_a_graph_differentiates_an_opaque_function() -> None:
    torch.compiler.reset()
    x = torch.randn(3, requires_grad=True)
    y = torch.compile(lambda x: opaque(x, (5.0, 7.0)), backend="aot_eager", fullgraph=True)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.full((3,), 5.0))


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_pass_knows_whether_it_is_differentiated(again: bool) -> None:
    found = []

    class Twice(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.append(is_differentiated_again())
            return grad * 2

    x = torch.randn(3, requires_grad=True)
    torch.autograd.grad(Twice.apply(x).sum(), x, create_graph=again)
    assert found == [again]
