"""Functions that the compiler would hide from a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale


@pytest.mark.parametrize("function", [F.hardswish, F.tanh])
def test_a_compiled_model_computes_them_by_its_plan(function) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    a, b = nn.Linear(16, 16), nn.Linear(16, 16)
    net, x = unit_scale(Net(lambda m, x: m.b(function(m.a(x))), a=a, b=b)), torch.randn(8, 16)
    expected = net(x)
    got = torch.compile(net, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(got, expected)
