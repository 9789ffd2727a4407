"""What torch.compile makes of a model: a graph that breaks runs in eager mode, with a warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp8
from tests.transforms.models import Net
from unit_scaling.transforms import simulate_fp8, unit_scale

TRANSFORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "unit_scale": unit_scale,
    "simulate_fp8": simulate_fp8,
    "both": lambda model: simulate_fp8(unit_scale(model)),
}


def breaks(m: Net, x: Tensor) -> Tensor:
    h = torch.relu(m.first(x))
    torch._dynamo.graph_break()
    return m.second(h)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_model_that_breaks_the_graph_runs_in_eager_mode_with_a_warning(name: str) -> None:
    torch.manual_seed(0)
    model, x = (
        TRANSFORMS[name](Net(breaks, first=nn.Linear(8, 8), second=nn.Linear(8, 8))),
        torch.randn(4, 8),
    )
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.warns(fp8.PitfallWarning, match="the forward pass of this Net in one piece"):
        found = compiled(x)
    assert torch.equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert torch.equal(compiled(x), expected)


def grows(m: Net, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    if not hasattr(m, "late"):
        m.late = nn.Sequential(nn.Identity(), nn.Tanh())
    return m.late(m.layer(x))


@pytest.mark.filterwarnings("ignore::fp8.PitfallWarning")
@pytest.mark.parametrize("called", [False, True])
def test_a_module_that_is_registered_in_a_broken_graph(called: bool) -> None:
    model, x = unit_scale(Net(grows, layer=nn.Linear(8, 8))), torch.randn(4, 8)
    expected = copy.deepcopy(model)(x)
    if called:
        model(x)
    model.compile(backend="aot_eager")
    for _ in range(2):
        assert torch.equal(model(x), expected)


def test_a_model_of_many_levels_compiles() -> None:
    """A compiler follows each call by dozens of its own, torch 2.12's by more than the others, and
    Python allows 1000."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(2 if (2, 12) <= torch.__version__ < (2, 13) else 4):
        model = nn.Sequential(model)
    ours, x = simulate_fp8(unit_scale(model)), torch.randn(2, 4)
    expected = ours(x)
    torch.compiler.reset()
    assert torch.equal(torch.compile(ours, backend="eager", fullgraph=True)(x), expected)
