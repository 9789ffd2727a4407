"""`track_scales`: every number against one computed by hand, on models run in every way."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F

import unit_scaling as uu
import unit_scaling.functional as U
from tests.transforms.inspect.test_metrics import check
from tests.transforms.models import Checkpointed, batch, gpt, same, step, tiny
from unit_scaling.transforms import (
    compile,
    simulate_fp8,
    track_scales,
    unit_scale,
)


def meta(graph: Graph) -> dict[Any, dict[str, Any]]:
    """Function, or name where it is a method or a placeholder -> what is known of it."""
    return {
        n.meta["clean_name"] if isinstance(n.target, str) else n.target: n.meta for n in graph.nodes
    }


# The graph


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return (x + torch.ones_like(x)).sum()


def test_the_graph_and_its_numbers():
    torch.manual_seed(0)
    model, x = track_scales(Model()), torch.randn(16, 1024)
    assert not list(model.scales_graph().nodes)
    loss = model(x)
    found = meta(model.scales_graph())
    assert set(found) == {"x", F.relu, torch.ones_like, operator.add, "sum_1", "output"}
    for name, value in (("x", x), (F.relu, x.relu()), (operator.add, x.relu() + 1)):
        check(found[name]["metrics"].fwd, value)
        assert found[name]["metrics"].bwd is None
    loss.backward()
    assert found["sum_1"]["metrics"].bwd.mean_abs == 1.0
    assert found["sum_1"]["metrics"].fwd.std == 0.0
    check(found[operator.add]["metrics"].bwd, torch.ones(16, 1024))
    check(found["x"]["metrics"].bwd, (x > 0).float())
    assert found[torch.ones_like]["metrics"].bwd is None
    assert x.grad is None
    assert not x.requires_grad


def test_every_node_is_described():
    model = track_scales(gpt())
    model(*batch())[1].backward()
    graph = model.scales_graph()
    graph.lint()
    for node in graph.nodes:
        floating = node.meta["outputs_float_tensor"]
        assert floating == ("metrics" in node.meta)
        assert not floating or node.meta["metrics"].bwd is not None
    weights = {n.meta["clean_name"] for n in graph.nodes if n.meta["requires_grad"]}
    assert "self_modules_blocks_modules_0_modules_qkv_parameters_weight" in weights
    assert len(weights) == len(list(model.parameters()))
    paths = {n.target: n.meta["path"] for n in graph.nodes if n.op == "call_function"}
    assert paths[F.gelu] == "blocks.1"


@pytest.mark.parametrize("spelled", ["x + y", "x @ y", "x.add", "iadd", "setitem", "property"])
def test_spellings(spelled: str):
    functions = {
        "x + y": (lambda x, y: x + y, operator.add),
        "x @ y": (lambda x, y: x @ y, operator.matmul),
        "x.add": (lambda x, y: x.add(y, alpha=2), "add"),
        "iadd": (lambda x, y: operator.iadd(x * 1, y), operator.iadd),
        "setitem": (lambda x, y: operator.setitem(z := x * 1, 0, y[0]) or z, operator.setitem),
        "property": (lambda x, y: x.mT, getattr),
    }
    function, target = functions[spelled]

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return function(x, y)

    torch.manual_seed(0)
    model, x, y = track_scales(Two()), torch.randn(4, 4), torch.randn(4, 4)
    out = model(x, y)
    *_, last, output = model.scales_graph().nodes
    assert last.target == target
    assert output.all_input_nodes == [last]
    check(last.meta["metrics"].fwd, out)
    torch.testing.assert_close(out, function(x, y), rtol=0, atol=0)


def test_values_are_those_that_are_computed():
    """Of a transformed model, in whichever order; measuring changes nothing."""
    for transform in (lambda m: m, unit_scale, lambda m: simulate_fp8(unit_scale(m))):
        plain = transform(tiny())
        for tracked in (track_scales(transform(tiny())), transform(track_scales(tiny()))):
            same(step(tracked), step(plain))
            logits, loss = plain(*batch())
            found = meta(tracked.scales_graph())
            check(found[F.cross_entropy]["metrics"].fwd, loss)
            last = [n for n in tracked.scales_graph().nodes if n.target is F.linear][-1]
            check(last.meta["metrics"].fwd, logits)
            weight = found["self_modules_blocks_modules_0_modules_up_parameters_weight"]
            loss.backward()
            check(weight["metrics"].bwd, plain.blocks[0].up.weight.grad)


def test_functions_of_unit_scaling_are_nodes():
    torch.manual_seed(0)
    model = track_scales(uu.MLP(16))
    model(torch.randn(8, 16)).sum().backward()
    targets = [n.target for n in model.scales_graph().nodes if n.op == "call_function"]
    assert targets == [U.linear, U.linear, U.silu_glu, U.linear]


def test_many_graphs_passes_and_dtypes():
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            if x.sum().item() > 0:  # a graph break to a compiler
                x = x * 2
            return self.layer(x)

    torch.manual_seed(0)
    x = torch.randn(4, 8).bfloat16()
    for model in (Breaks().bfloat16(), torch.compile(Breaks().bfloat16(), backend="eager")):
        tracked = track_scales(model)
        out = tracked(x)
        first = tracked.scales_graph()
        again = tracked(2 * x)
        (out.sum() + again.sum()).backward()
        assert tracked.scales_graph() is not first
        calls = [n for n in first.nodes if n.target is F.linear]
        assert len(calls) == 2
        for graph, value in ((first, out), (tracked.scales_graph(), again)):
            last = [n for n in graph.nodes if n.target is F.linear][-1]
            check(last.meta["metrics"].fwd, value)
            check(last.meta["metrics"].bwd, torch.ones(4, 8))


def test_compiled_models():
    """They run in eager mode."""
    torch._dynamo.reset()
    model = unit_scale(tiny())
    expected = step(model)
    with pytest.raises(Exception, match="track_scales measures the model in eager mode"):
        torch.compile(track_scales(model), backend="eager", fullgraph=True)(*batch())
    torch._dynamo.reset()
    for tracked in (
        torch.compile(track_scales(model), backend="eager"),
        track_scales(torch.compile(model, backend="eager")),
        track_scales(compile(model)),
    ):
        same(step(tracked), expected)
        assert F.cross_entropy in meta(tracked.scales_graph())


def test_nothing_is_left_behind():
    model = track_scales(tiny())
    _, loss = model(*batch())
    first = model.scales_graph()
    with torch.no_grad():
        model(*batch())
    assert not any(p._backward_hooks for p in model.parameters())
    loss.backward()  # no hook of the first call on a parameter may fire
    for graph in (first, model.scales_graph()):
        weights = [n.meta["metrics"] for n in graph.nodes if n.meta["requires_grad"]]
        assert weights
        assert all(metrics.bwd is None for metrics in weights)


def test_a_parameter_that_is_returned_as_it_is():
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.float().contiguous()

    model = track_scales(Cast())
    model(torch.ones(3)).sum().backward()
    weights = [n.name for n in model.scales_graph().nodes if n.meta["requires_grad"]]
    assert weights == ["self_parameters_weight"]
    model.scales_graph().lint()
    with torch.no_grad():
        model(torch.ones(3))
    assert not model.weight._backward_hooks


def test_copies_measure_by_themselves():
    model = track_scales(tiny())
    model(*batch())
    graph = model.scales_graph()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), unit_scale(model)):
        assert not list(copied.scales_graph().nodes)
        copied(*batch())
        assert list(copied.scales_graph().nodes)
        assert model.scales_graph() is graph is not copied.scales_graph()


def test_checkpoints_are_measured_once():
    torch.manual_seed(0)
    model = track_scales(Checkpointed())
    model(torch.randn(4, 8)).sum().backward()
    (node,) = [n for n in model.scales_graph().nodes if n.target is F.linear]
    check(node.meta["metrics"].bwd, torch.ones(4, 8))


def test_inputs_in_every_place():
    class Many(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *more: Tensor, **named: Tensor) -> dict:
            x = pair[0] + pair[1] + more[0] + named["bias"]
            x += 1
            pair[0].mul_(1)
            return {"y": x, "all": [x, pair[0]], "text": "no tensor"}

    torch.manual_seed(0)
    tensors = [torch.randn(4, requires_grad=i == 3) for i in range(4)]
    model = track_scales(Many())
    out = model((tensors[0], tensors[1]), tensors[2], bias=tensors[3])
    names = [n.name for n in model.scales_graph().nodes if n.op == "placeholder"]
    assert names == ["pair_0", "pair_1", "more_0", "named_bias"]
    out["y"].sum().backward()
    torch.testing.assert_close(tensors[3].grad, torch.ones(4))
    bwd = [n.meta["metrics"].bwd for n in model.scales_graph().nodes if n.op == "placeholder"]
    assert [data.mean_abs for data in bwd] == [1.0] * 4
    assert model.scales_graph().output_node().args[0]["text"] == "no tensor"


def test_a_model_that_wants_gradients_of_its_input():
    """As the speech models of Hugging Face do, for checkpointing."""

    class Wants(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x[:, None]
            y.requires_grad = True
            return y * 2

    model = track_scales(Wants())
    model(torch.ones(3)).sum().backward()
    assert meta(model.scales_graph())["x"]["metrics"].bwd.mean_abs == 2.0


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"needs an nn\.Module, got function"):
        track_scales(F.relu)


def test_a_call_that_is_recorded_and_expanded_is_watched() -> None:
    """The recording of the first call ended with another's place in the order of modes."""
    from fp8.common.compiler import FIRST_LOOK

    tracked = track_scales(unit_scale(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)))
    tracked(torch.randn(2, 3, 8)).sum().backward()
    assert len(tracked.scales_graph().nodes) > 10
    assert not FIRST_LOOK.items
