"""Kernels of inductor: which graphs become some."""

import pytest
import torch

from fp8.torch_internals.decorators import in_graph
from fp8.torch_internals.inductor import run_compiled
from fp8.torch_internals.running_calls import is_inductors
from tests.shared import in_one_graph

ANSWERS = []


@in_graph
def doubled(x):
    ANSWERS.append(is_inductors())
    return 2 * x


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="code that runs may count as compiled"
)
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", "inductor", "by hand", "none"]
)
def test_which_graphs_are_inductors(backend):
    """Those whose conversions are Triton's: the last trace of a function decides what runs."""
    torch.compiler.reset()
    ANSWERS.clear()
    x = torch.ones(4, requires_grad=True)
    if backend == "by hand":
        run_compiled(lambda x: [doubled(x)], x.detach())
    elif backend == "none":
        doubled(x)
    else:
        in_one_graph(doubled, backend)(x).sum().backward()
    assert ANSWERS
    assert ANSWERS[-1] == (backend in ("inductor", "by hand"))
    assert any(ANSWERS) == ANSWERS[-1]
