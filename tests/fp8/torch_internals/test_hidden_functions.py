"""Functions that torch.compile hides from modes: a mode sees them in a compiled model."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.shared import Net, assert_close, in_one_graph
from unit_scaling.transforms import unit_scale


@pytest.mark.parametrize(
    ("function", "seen"),
    [(F.hardswish, F.hardswish), (F.tanh, Tensor.tanh), (F.sigmoid, Tensor.sigmoid)],
)
def test_a_mode_sees_them_in_a_compiled_model(function, seen):
    torch.compiler.reset()
    a, b, x = nn.Linear(16, 16), nn.Linear(16, 16), torch.randn(8, 16)
    plain = Net(lambda m, x: m.b(function(m.a(x))), a=a, b=b)
    net = unit_scale(plain, {seen: F.relu}, batch=x)
    expected = net.b(net.a(x).relu())
    for call in (net, in_one_graph(net, "eager")):
        assert_close(call(x), expected)
