"""Blocks under torch.compile, with a recipe whose effect is large."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
from fp8.torch_internals.compiling_flag import call_by_name
from fp8.torch_internals.stance import outside_compiler
from tests.fp8.calls import COARSE
from tests.fp8.modes.test_autocast import Counting
from tests.fp8.products.test_matmul import randn


def results(call, model, x):
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), [x, *model.parameters()])]


def assert_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        # Fused code may round an operand to the other side of a tie: rare, and not far off.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_is_compiled_outside_is_compiled_anew_for_the_block(backend, monkeypatch):
    """Its kernels, which the mode sees at each call, are not cast once more."""
    model, x = nn.Linear(8, 4), randn(5, 8)
    compiled = torch.compile(model, backend=backend)
    plain = results(compiled, model, x) if backend != "inductor" else results(model, model, x)

    def block(call):
        def run(x):
            with fp8.autocast(COARSE):
                return call(x)

        return run

    expected = results(block(model), model, x)
    torch._dynamo.utils.counters.clear()
    assert_close(results(block(compiled), model, x), expected)
    graphs = dict(torch._dynamo.utils.counters["stats"])
    assert graphs["unique_graphs"] == 1
    counts = Counting(monkeypatch)
    assert_close(results(block(compiled), model, x), expected)
    assert counts == ({"e3m2": 1, "e2m1": 1, "e2m3": 1} if backend == "eager" else {})
    if backend != "inductor":
        assert_close(results(compiled, model, x), plain)
    assert torch._dynamo.utils.counters["stats"] == graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_disabled_block_inside_of_what_is_compiled(backend):
    """Around which eager code has a block open, whose mode sees the calls of the graph."""
    x, w = randn(5, 16).detach(), randn(16, 16).detach()

    def call(x):
        with fp8.autocast(enabled=False):
            y = F.linear(F.scaled_dot_product_attention(x, x, x), w)
        return y @ w

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for recipe in ("tensor", COARSE):
        with fp8.autocast(recipe):
            assert_close([compiled(x)], [call(x)])


def test_a_graph_break_within_the_block_is_computed_the_same():
    layer, x = nn.Linear(8, 8), randn(5, 8)

    def block(x):
        with fp8.autocast(COARSE):
            x = layer(x)
            torch._dynamo.graph_break()
            return layer(x)

    expected = results(block, layer, x)
    compiled = torch.compile(block, backend="aot_eager")
    assert_close(results(compiled, layer, x), expected)
    torch._dynamo.reset()
    whole = torch.compile(block, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(x)
    assert fp8.products.active.product_recipe() is None


def test_a_block_that_is_opened_in_pieces_is_an_error_by_name():
    """torch compiles ``__enter__`` by itself then, and later what the block calls."""
    layer, x = torch.compiler.disable(nn.Linear(8, 8)), randn(5, 8)

    def block(x):
        with fp8.autocast("tensor"):
            return layer(x)

    with pytest.raises(RuntimeError, match="could not be compiled in one piece"):
        torch.compile(block, backend="eager")(x)
    assert fp8.frame.FRAMES.items[-1].block is None


@pytest.mark.parametrize("block", [lambda run: fp8.autocast("tensor")(run)(), outside_compiler])
def test_other_threads_are_compiled(block):
    """While one has a block open, or runs outside of the compiler."""
    graphs = []

    def backend(graph, _):
        graphs.append(threading.get_ident())
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)

    def here():
        thread = threading.Thread(target=compiled, args=(torch.ones(3),))
        thread.start()
        thread.join()
        elsewhere = graphs == [thread.ident]
        compiled(torch.ones(3))
        return elsewhere

    assert block(here)
    assert (threading.get_ident() in graphs) == (block is not outside_compiler)
    graphs.clear()
    torch._dynamo.reset()
    compiled(torch.ones(3))
    assert graphs == [threading.get_ident()]


def test_a_product_with_casts_is_one_call_of_the_graph():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def products(x, w):
        with fp8.autocast("nvfp4"):
            return F.linear(x, w), F.conv1d(x[None], w[..., None])

    products(randn(16, 16), randn(16, 16))
    (graph,) = graphs
    called = [node.args[0] for node in graph.graph.nodes if node.target is call_by_name]
    assert called == ["fp8.products.matmul.simulated"] * 2


@pytest.mark.parametrize(
    ("recipe", "backend"), [("tensor", "auto"), ("delayed", "simulate"), ("static", "auto")]
)
def test_a_converted_model_is_exported_for_any_batch(recipe, backend):
    """The look for kernels puts no guard on the number of tokens."""
    model = fp8.convert(nn.Sequential(nn.Linear(32, 16), nn.GELU()), recipe, backend=backend)
    model(randn(4, 5, 32)).sum().backward()
    model(randn(4, 5, 32))  # notes that static scales are set
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    exported = torch.export.export(model, (randn(4, 5, 32).detach(),), dynamic_shapes=(batch,))
    x = randn(7, 5, 32, seed=1).detach()
    with torch.no_grad():
        assert torch.equal(exported.module()(x), model(x))
    shapes = [n for n in exported.graph.nodes if "squeeze" in str(n.target)]
    assert not shapes  # of a scale, which AOTInductor folds to a number: a number has no shape
