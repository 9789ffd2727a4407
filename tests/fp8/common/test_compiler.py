"""What is asked and hidden while a graph is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fp8.common import traced
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


def test_blocks_that_overlap_in_threads_leave_no_mark_of_compilation():
    """Functions for eager code alone, such as warnings, would be skipped from then on."""
    first, second = (traced._marked(True) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.compiler.is_compiling()
    second.__exit__(None, None, None)
    assert not torch.compiler.is_compiling()
