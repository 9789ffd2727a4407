"""Blocks under torch.compile, with a recipe whose effect is large."""

import torch
from torch import nn

import fp8
from tests.fp8.calls import COARSE
from tests.fp8.modes.test_autocast import Counting
from tests.shared import (
    assert_close,
    in_one_graph,
    linears,
    normal,
    pairs,
    parametrize,
    randn,
    refuses,
)


def results(call, model, x):
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), [x, *model.parameters()])]


def assert_near(got, expected):
    for one, other in pairs(got, expected):
        # Fused code may round an operand to the other side of a tie: rare, and not far off.
        assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@parametrize("backend", ["eager", "inductor"])
def test_what_is_compiled_outside_is_compiled_anew_for_the_block(backend, monkeypatch):
    """Its kernels, which the mode sees at each call, are not cast once more."""
    model, x = nn.Linear(8, 4), randn(5, 8)
    compiled = torch.compile(model, backend=backend)
    plain = (
        results(compiled, model, x)
        if backend != "inductor"
        else results(model, model, x)
    )

    def block(call):
        def run(x):
            with fp8.autocast(COARSE):
                return call(x)

        return run

    expected = results(block(model), model, x)
    torch._dynamo.utils.counters.clear()
    assert_near(results(block(compiled), model, x), expected)
    graphs = dict(torch._dynamo.utils.counters["stats"])
    assert graphs["unique_graphs"] == 1
    counts = Counting(monkeypatch)
    assert_near(results(block(compiled), model, x), expected)
    assert counts == ({"e3m2": 1, "e2m1": 1, "e2m3": 1} if backend == "eager" else {})
    if backend != "inductor":
        assert_near(results(compiled, model, x), plain)
    assert torch._dynamo.utils.counters["stats"] == graphs


def test_a_block_that_is_opened_in_pieces_is_an_error_by_name():
    """torch compiles ``__enter__`` by itself then, and later what the block calls."""
    layer, x = torch.compiler.disable(nn.Linear(8, 8)), randn(5, 8)

    def block(x):
        with fp8.autocast("tensor"):
            return layer(x)

    with refuses("could not be compiled in one piece", RuntimeError):
        torch.compile(block, backend="eager")(x)
    assert fp8.frame.FRAMES.items[-1].block is None


@parametrize(
    "recipe, backend", [("tensor", "auto"), ("delayed", "simulate"), ("static", "auto")]
)
def test_a_converted_model_is_exported_for_any_batch(recipe, backend):
    """The look for kernels puts no guard on the number of tokens."""
    model = fp8.convert(linears(32, 16, nn.GELU), recipe, backend=backend)
    model(randn(4, 5, 32)).sum().backward()
    model(randn(4, 5, 32))  # notes that static scales are set
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    exported = torch.export.export(model, (normal(4, 5, 32),), dynamic_shapes=(batch,))
    x = normal(7, 5, 32, seed=1)
    with torch.no_grad():
        assert torch.equal(exported.module()(x), model(x))
    shapes = [n for n in exported.graph.nodes if "squeeze" in str(n.target)]
    assert (
        not shapes
    )  # of a scale, which AOTInductor folds to a number: a number has no shape


@parametrize("backend", ["eager", "aot_eager"])
def test_a_disabled_block_inside_of_what_is_compiled(backend):
    """Around which eager code has a block open, whose mode sees the calls of the graph."""
    x, w = normal(5, 16), normal(16, 16)

    def call(x):
        with fp8.autocast(enabled=False):
            y = nn.functional.linear(
                nn.functional.scaled_dot_product_attention(x, x, x), w
            )
        return y @ w

    compiled = in_one_graph(call, backend)
    for recipe in ("tensor", COARSE):
        with fp8.autocast(recipe):
            assert_near([compiled(x)], [call(x)])
