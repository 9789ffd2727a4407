"""What torch.compile makes of models with control flow, with regions, whose functions torch runs
outside of modes, and with graphs that break."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import fp8
from tests.transforms.models import TRANSFORMS, Net
from unit_scaling.transforms import simulate_fp8, unit_scale


def part(m, x):
    return m.second(torch.relu(m.first(x)))


@torch.compiler.nested_compile_region
def region(m, x):
    return part(m, x)


def conditional(m, x):
    return torch.cond(x.sum() > -1e9, lambda x: part(m, x), lambda x: part(m, x) * 2, (x,))


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def results(call):
    y = call(X)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), X)]


def transformed(name, kind):
    torch.manual_seed(0)
    model = TRANSFORMS[name](Net(kind, first=nn.Linear(16, 16), second=nn.Linear(16, 16)))
    results(model)
    return model


@pytest.mark.parametrize("kind", [conditional, region])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_eager(name, kind):
    torch.testing.assert_close(results(transformed(name, kind)), results(transformed(name, part)))


@pytest.mark.parametrize(
    ("name", "kind"), [("simulate_fp8", conditional), *((name, region) for name in TRANSFORMS)]
)
def test_compiled(name, kind):
    model = transformed(name, kind)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled), results(model))


def test_a_plan_is_not_followed_through_control_flow_of_a_graph():
    model = transformed("unit_scale", conditional)
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError, match="follow the plan"):
        torch.compile(model, backend="eager")(X)


# Graphs that break run in eager mode, with a warning


def breaks(m: Net, x: Tensor) -> Tensor:
    h = torch.relu(m.first(x))
    torch._dynamo.graph_break()
    return m.second(h)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_model_that_breaks_the_graph_runs_in_eager_mode_with_a_warning(name: str) -> None:
    model = transformed(name, breaks)
    expected = model(X)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.warns(fp8.PitfallWarning, match="the forward pass of this Net in one piece"):
        found = compiled(X)
    assert torch.equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert torch.equal(compiled(X), expected)


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
