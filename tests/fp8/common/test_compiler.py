"""What is asked and hidden while a graph is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8.common import compiler, traced
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale


@pytest.mark.parametrize(
    ("function", "seen"),
    [(F.hardswish, F.hardswish), (F.tanh, Tensor.tanh), (F.sigmoid, Tensor.sigmoid)],
)
def test_a_mode_sees_them_in_a_compiled_model(function, seen) -> None:
    torch.compiler.reset()
    a, b, x = nn.Linear(16, 16), nn.Linear(16, 16), torch.randn(8, 16)
    plain = Net(lambda m, x: m.b(function(m.a(x))), a=a, b=b)
    net = unit_scale(plain, {seen: F.relu}, batch=x)
    expected = net.b(net.a(x).relu())
    for call in (net, torch.compile(net, backend="eager", fullgraph=True)):
        torch.testing.assert_close(call(x), expected)


def test_blocks_that_overlap_in_threads_leave_no_mark_of_compilation():
    """Functions for eager code alone, such as warnings, would be skipped from then on."""
    first, second = (traced._marked(True) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.compiler.is_compiling()
    second.__exit__(None, None, None)
    assert not torch.compiler.is_compiling()


ANSWERS: list[bool] = []


@compiler.in_graph
def doubled(x: Tensor) -> Tensor:
    ANSWERS.append(compiler.is_inductors())
    return 2 * x


@pytest.mark.skipif(torch.__version__ < "2.13", reason="code that runs may count as compiled")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "by hand", "none"])
def test_which_graphs_are_inductors(backend):
    """Those whose conversions are Triton's: the last trace of a function decides what runs."""
    torch.compiler.reset()
    ANSWERS.clear()
    x = torch.ones(4, requires_grad=True)
    if backend == "by hand":
        traced.run_compiled(lambda x: [doubled(x)], x.detach())
    elif backend == "none":
        doubled(x)
    else:
        torch.compile(doubled, backend=backend, fullgraph=True)(x).sum().backward()
    assert ANSWERS
    assert ANSWERS[-1] == (backend in ("inductor", "by hand"))
    assert any(ANSWERS) == ANSWERS[-1]
