"""`track_scales`: every number against one computed by hand, on models run in every way."""

import copy
import math
import operator

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

import unit_scaling as uu
import unit_scaling.functional as U
from fp8.frame import FRAMES
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    filterwarnings,
    in_one_graph,
    parametrize,
    pickled,
    refuses,
)
from tests.transforms.models import batch, checkpointed, gpt, step, tiny
from unit_scaling.transforms import (
    Metrics,
    compile,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
    simulate_fp8,
    track_scales,
    unit_scale,
)


def check(data, x):
    """Sums of float32 numbers in another order: n * 2**-24 relative, n up to 2**14."""
    x = x.detach().double()
    expected = {
        "mean_abs": x.abs().mean(),
        "abs_mean": x.mean().abs(),
        "std": x.std() if x.numel() > 1 else torch.tensor(0.0),
        "abs_max": x.abs().max(),
        "abs_min": x.abs().min(),
        "rms": x.square().mean().sqrt(),
    }
    for name, value in expected.items():
        assert getattr(data, name) == pytest.approx(value.item(), rel=1e-3, abs=1e-6), (
            name
        )
    assert data.numel == x.numel()


@parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@parametrize("shape", [(1,), (), (64, 33)])
def test_metrics(dtype, shape):
    x = (100 * torch.randn(shape)).to(dtype)
    check(Metrics.from_tensor(x), x)


@filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_metrics_of_odd_tensors():
    assert Metrics.from_tensor(torch.zeros(0, 3)).numel == 0
    data = Metrics.from_tensor(torch.zeros(0, 3))
    assert all(value == 0 for value in [data.mean_abs, data.std, data.rms])
    assert math.isnan(Metrics.from_tensor(torch.tensor([1.0, math.nan])).rms)
    indices, values = torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    assert Metrics.from_tensor(sparse).mean_abs == 0.75


def test_metrics_have_names():
    first = "mean_abs abs_mean std abs_max abs_min numel".split()
    assert Metrics.names()[:6] == first
    assert len(Metrics.full_names()) == len(Metrics.names())
    assert Metrics.get_full_name("std") == "standard deviation"
    assert all(
        hasattr(Metrics.from_tensor(torch.ones(2)), name) for name in Metrics.names()
    )
    with refuses("unknown metric 'mean'; choose one of 'mean_abs'"):
        Metrics.get_full_name("mean")
    metrics = Metrics(torch.ones(2))
    assert metrics.bwd is None
    metrics.set_bwd(torch.full((2,), 3.0))
    assert metrics.bwd.mean_abs == 3.0
    assert "mean_abs=3.0" in str(metrics)


def nodes_of(model):
    return model.scales_graph().nodes


def meta(graph):
    """Function, or name where it is a method or a placeholder -> what is known of it."""
    return {
        n.meta["clean_name"] if isinstance(n.target, str) else n.target: n.meta
        for n in graph.nodes
    }


# The graph


def test_the_graph_and_its_numbers():
    model = track_scales(
        Net(lambda m, x: ((x := F.relu(x)) + torch.ones_like(x)).sum())
    )
    x = torch.randn(16, 1024)
    assert not list(nodes_of(model))
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


@parametrize("spelled", ["x + y", "x @ y", "x.add", "iadd", "setitem", "property"])
def test_spellings(spelled):
    functions = {
        "x + y": (lambda x, y: x + y, operator.add),
        "x @ y": (lambda x, y: x @ y, operator.matmul),
        "x.add": (lambda x, y: x.add(y, alpha=2), "add"),
        "iadd": (lambda x, y: operator.iadd(x * 1, y), operator.iadd),
        "setitem": (
            lambda x, y: operator.setitem(z := x * 1, 0, y[0]) or z,
            operator.setitem,
        ),
        "property": (lambda x, y: x.mT, getattr),
    }
    function, target = functions[spelled]

    class Two(nn.Module):
        def forward(self, x, y):
            return function(x, y)

    model, x, y = track_scales(Two()), torch.randn(4, 4), torch.randn(4, 4)
    out = model(x, y)
    *_, last, output = nodes_of(model)
    assert last.target == target
    assert output.all_input_nodes == [last]
    check(last.meta["metrics"].fwd, out)
    assert_same(out, function(x, y))


def test_values_are_those_that_are_computed():
    """Of a transformed model, in whichever order; measuring changes nothing."""
    for transform in (lambda m: m, unit_scale, lambda m: simulate_fp8(unit_scale(m))):
        plain = transform(tiny())
        for tracked in (
            track_scales(transform(tiny())),
            transform(track_scales(tiny())),
        ):
            assert_same(step(tracked), step(plain))
            logits, loss = plain(*batch())
            found = meta(tracked.scales_graph())
            check(found[F.cross_entropy]["metrics"].fwd, loss)
            last = [n for n in tracked.scales_graph().nodes if n.target is F.linear][-1]
            check(last.meta["metrics"].fwd, logits)
            weight = found["self_modules_blocks_modules_0_modules_up_parameters_weight"]
            loss.backward()
            check(weight["metrics"].bwd, plain.blocks[0].up.weight.grad)


def test_functions_of_unit_scaling_are_nodes():
    model = track_scales(uu.MLP(16))
    model(torch.randn(8, 16)).sum().backward()
    targets = [n.target for n in nodes_of(model) if n.op == "call_function"]
    assert targets == [U.linear, U.linear, U.silu_glu, U.linear]


@parametrize("compiled", [False, True])
def test_graph_breaks_and_passes(compiled):
    def forward(m, x):
        x = m.layer(x)
        if x.sum().item() > 0:  # a graph break to a compiler
            x = x * 2
        return m.layer(x)

    model, x = (
        Net(forward, layer=nn.Linear(8, 8)).bfloat16(),
        torch.randn(4, 8).bfloat16(),
    )
    tracked = track_scales(torch.compile(model, backend="eager") if compiled else model)
    out = tracked(x)
    first = tracked.scales_graph()
    again = tracked(2 * x)
    (out.sum() + again.sum()).backward()
    assert tracked.scales_graph() is not first
    for graph, value in ((first, out), (tracked.scales_graph(), again)):
        _, last = [n for n in graph.nodes if n.target is F.linear]
        check(last.meta["metrics"].fwd, value)
        check(last.meta["metrics"].bwd, torch.ones(4, 8))


def test_compiled_models():
    """They run in eager mode."""
    torch._dynamo.reset()
    model = unit_scale(tiny())
    expected = step(model)
    with refuses("track_scales measures the model in eager mode", Exception):
        in_one_graph(track_scales(model), "eager")(*batch())
    torch._dynamo.reset()
    for tracked in (
        torch.compile(track_scales(model), backend="eager"),
        track_scales(compile(model)),
    ):
        assert_same(step(tracked), expected)
        assert F.cross_entropy in meta(tracked.scales_graph())


def test_nothing_is_left_behind():
    """A parameter that is returned as it is has no hook either."""
    model = Net(lambda m, x: x * m.weight.float().contiguous())
    model.weight = nn.Parameter(torch.ones(3))
    model = track_scales(model)
    loss = model(torch.ones(3)).sum()
    first = model.scales_graph()
    first.lint()
    with torch.no_grad():
        model(torch.ones(3))
    assert not model.weight._backward_hooks
    loss.backward()  # no hook of the first call on a parameter may fire
    for graph in (first, model.scales_graph()):
        weights = {
            n.name: n.meta["metrics"] for n in graph.nodes if n.meta["requires_grad"]
        }
        assert weights.keys() == {"self_parameters_weight"}
        assert all(metrics.bwd is None for metrics in weights.values())


def test_copies_measure_by_themselves():
    model = track_scales(tiny())
    model(*batch())
    graph = model.scales_graph()
    for copied in (copy.deepcopy(model), pickled(model), unit_scale(model)):
        assert not list(copied.scales_graph().nodes)
        copied(*batch())
        assert list(copied.scales_graph().nodes)
        assert model.scales_graph() is graph is not copied.scales_graph()


def test_checkpoints_are_measured_once():
    model = track_scales(checkpointed())
    model(torch.randn(4, 8)).sum().backward()
    (node,) = [n for n in nodes_of(model) if n.target is F.linear]
    check(node.meta["metrics"].bwd, torch.ones(4, 8))


def test_inputs_in_every_place():
    class Many(nn.Module):
        def forward(self, pair, *more, **named):
            x = pair[0] + pair[1] + more[0] + named["bias"]
            x += 1
            pair[0].mul_(1)
            return {"y": x, "all": [x, pair[0]], "text": "no tensor"}

    tensors = [torch.randn(4, requires_grad=i == 3) for i in range(4)]
    model = track_scales(Many())
    out = model((tensors[0], tensors[1]), tensors[2], bias=tensors[3])
    names = [n.name for n in nodes_of(model) if n.op == "placeholder"]
    assert names == "pair_0 pair_1 more_0 named_bias".split()
    out["y"].sum().backward()
    assert_close(tensors[3].grad, torch.ones(4))
    bwd = [n.meta["metrics"].bwd for n in nodes_of(model) if n.op == "placeholder"]
    assert [data.mean_abs for data in bwd] == [1.0] * 4
    assert model.scales_graph().output_node().args[0]["text"] == "no tensor"


def test_the_first_call_of_a_part_is_tracked_once():
    """Not while it is recorded and measured, also where the model around it is a plain one."""
    part = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    for model in (unit_scale(part), nn.Sequential(nn.Linear(8, 8), unit_scale(part))):
        tracked, x = track_scales(model), torch.randn(2, 3, 8)
        graphs = []
        for _ in range(2):
            tracked(x).sum().backward()
            graphs.append([node.name for node in tracked.scales_graph().nodes])
        assert graphs[0] == graphs[1]
        assert len(graphs[0]) > 10
    assert not FRAMES.items[-1].early_modes


# Pruned graphs


def words(m, idxs):
    x = m.emb(idxs)
    top = torch.unsqueeze(torch.argmax(F.softmax(m.linear(x), dim=-1), dim=-1), -1)
    values = torch.gather(x, -1, top)
    values -= x.mean()
    return values, top


def targets(graph):
    return set(meta(graph))


def test_prune_non_float_tensors():
    model = track_scales(
        Net(words, emb=nn.Embedding(1024, 64), linear=nn.Linear(64, 64))
    )
    model(torch.randint(0, 1024, (8, 32)))
    graph = model.scales_graph()
    integers = {"x", torch.argmax, torch.unsqueeze}
    floats = {
        "self_modules_emb_parameters_weight", F.embedding, "self_modules_linear_parameters_weight",
        "self_modules_linear_parameters_bias", F.linear, F.softmax, torch.gather, operator.isub,
        "mean", "output",
    }  # fmt: skip
    assert targets(graph) == integers | floats
    assert targets(prune_non_float_tensors(graph)) == floats
    assert targets(graph) == integers | floats  # a copy


def test_prune_same_scale_tensors():
    def shapes(m, a):
        b = a / 1.0
        c = b * 1.0  # the gradient of b is that of c and of d
        d = F.relu(c)
        x, y = (b - d).view(-1, 2).unbind(-1)
        return torch.stack([x, y]).flatten().sum()

    model = track_scales(Net(shapes))
    loss = model(torch.randn(64, 256))
    forward = prune_same_scale_tensors(prune_non_float_tensors(model.scales_graph()))
    kept = {"x", F.relu, operator.sub, operator.getitem, torch.stack, "sum_1", "output"}
    assert targets(forward) == kept
    loss.backward()
    both = prune_same_scale_tensors(model.scales_graph())
    assert targets(both) == kept | {operator.mul, "unbind"}
    loose = prune_same_scale_tensors(forward, rtol=0.05)
    assert operator.getitem not in targets(loose)
    stacks = [n for n in loose.nodes if n.target is torch.stack]
    assert all(
        source.target is operator.sub for n in stacks for source in n.all_input_nodes
    )


def test_prune_selected_nodes():
    model = track_scales(Net(lambda m, x: torch.abs(F.relu(x + 1)).sum()))
    model(torch.randn(4, 4))
    graph = prune_selected_nodes(model.scales_graph(), [torch.abs, F.relu])
    assert targets(graph) == {"x", operator.add, "sum_1", "output"}
    assert (
        next(n for n in graph.nodes if n.name == "sum_1").args[0].target is operator.add
    )
    assert targets(prune_selected_nodes(graph, ["sum"])) == {
        "x",
        operator.add,
        "output",
    }


def test_graphs_of_another_origin_are_refused():
    for prune in (prune_non_float_tensors, prune_same_scale_tensors):
        with refuses("not one of track_scales"):
            prune(symbolic_trace(nn.Linear(2, 2)).graph)
    for prune in (
        prune_non_float_tensors,
        lambda graph: prune_selected_nodes(graph, []),
    ):
        with refuses(r"graph is a torch\.fx\.Graph, .* got Linear", TypeError):
            prune(nn.Linear(2, 2))  # type: ignore[arg-type]
