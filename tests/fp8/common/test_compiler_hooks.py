"""Functions that the compiler would hide from a plan or a recipe."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from fp8.common.compiler_hooks import HIDDEN
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

LATE = """
import torch
from torch.overrides import TorchFunctionMode
class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {})) * 2
@torch.compile(backend="eager", fullgraph=True)
def double(x):
    with Mode():
        return torch.nn.functional.hardswish(x)
x = torch.ones(2)
before = double(x)
import unit_scaling.transforms
torch.compiler.reset()
assert torch.equal(double(x), 2 * torch.nn.functional.hardswish(x)), (before, double(x))
"""


@pytest.mark.parametrize("function", HIDDEN, ids=lambda function: function.__name__)
def test_a_compiled_model_computes_them_by_its_plan(function) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    a, b = nn.Linear(16, 16), nn.Linear(16, 16)
    net, x = unit_scale(Net(lambda m, x: m.b(function(m.a(x))), a=a, b=b)), torch.randn(8, 16)
    expected = net(x)
    got = torch.compile(net, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(got, expected)


def test_also_where_something_was_compiled_before() -> None:
    subprocess.run([sys.executable, "-c", LATE], check=True)
