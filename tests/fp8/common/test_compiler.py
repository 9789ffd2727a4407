"""Functions that the compiler would hide from a plan."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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


@pytest.mark.parametrize("function", [F.hardswish, F.tanh])
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
