"""`fp8.stats`: shares against counts by hand, names, sampling, and that nothing else changes."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import RECIPES
from tests.fp8.blocks import block
from tests.fp8.calls import CALLS, operands
from tests.reference import cast, nearest, unrotated
from tests.shared import (
    Net,
    assert_same,
    in_one_graph,
    linears,
    parametrize,
    proves,
    randn,
    refuses,
)

KINDS = "unit tensor row_gw_hp block mxfp8 nvfp4".split()
"""A recipe for each kind of scales."""


def by_operand(seen):
    return {(row.layer, row.operand): row for row in seen.rows()}


def wide(*shape, seed=0):
    return (
        randn(*shape, seed=seed) * torch.exp2(4 * randn(*shape, seed=seed + 9))
    ).detach()


@proves("the field", "statistics of casts")
@parametrize("name", KINDS)
def test_shares_are_what_a_count_by_hand_gives(name):
    recipe = unrotated(nearest(RECIPES[name]))
    layer, x, g = nn.Linear(48, 32, bias=False), wide(40, 48), wide(40, 32, seed=3)
    x[3, 4], x[5, 6], x[0] = math.inf, math.nan, 0
    seen = fp8.stats(layer)
    with seen, fp8.autocast(recipe):
        y = layer(x.clone().requires_grad_())
    y.backward(g)
    rows = by_operand(seen)
    expected = {
        "input": (x, recipe.forward[0], -1),
        "weight": (layer.weight.detach(), recipe.forward[1], -1),
        "grad": (g, recipe.grad_input[0], -1),
    }
    for operand, (t, how, axis) in expected.items():
        row, ok = rows["(model)", operand], t.isfinite()
        q = cast(t, how, axis)
        assert (row.format, row.elements, row.nonfinite) == (
            how.format,
            t.numel(),
            (~ok).sum(),
        )
        assert row.zero == float(((q == 0) & (t != 0)).double().mean())
        kept = ok & q.isfinite()
        clean, rounded = t[kept].double(), q[kept]
        if (clean - rounded).any():
            noise = (clean - rounded).square().sum()
            assert row.sqnr == pytest.approx(
                10 * math.log10(clean.square().sum() / noise)
            )
    second = {operand for _, operand in rows if operand.endswith("again")}
    along = [how for how in (recipe.forward[0], recipe.grad_weight[1]) if how]
    assert ("input again" in second) == (len(along) == 2 and along[0].tile != (0, 0))


def test_subnormal_and_saturated():
    layer = nn.Linear(8, 1, bias=False)
    x = torch.tensor([[1.0, 2.0**-7, -(2.0**-9), 2.0**-11, 0.0, 449.0, 1e4, -448.0]])
    seen = fp8.stats(layer)
    with seen, fp8.autocast("unit"):
        layer(x)
    row = seen.rows()[0]
    assert (row.zero, row.subnormal, row.saturated, row.nonfinite) == (
        1 / 8,
        2 / 8,
        2 / 8,
        0,
    )


def test_one_inf_is_found_however_few_are_sampled():
    layer = nn.Linear(1024, 4, bias=False)
    for at in (0, 1023):
        x = torch.full((64, 1024), 2.0**-8)
        x[17, at] = -math.inf
        seen = fp8.stats(layer, sample=10)
        with seen, fp8.autocast("unit"):
            layer(x)
        row = seen.rows()[0]
        assert (row.nonfinite, row.elements) == (1, 64 * 1024)
        assert row.subnormal > 0.8  # of the sample
        assert "  1  " in str(seen).splitlines()[1]


def several(m, x):
    for part in m.blocks:
        x = part(x).tanh()
    x = nn.functional.scaled_dot_product_attention(x, x, x)
    return m.tied(m.head(x @ x.mT @ x))


def made():
    blocks = nn.ModuleList([nn.Linear(8, 8), nn.Conv1d(5, 5, 1)])
    head, tied = (nn.Linear(8, 8, bias=False) for _ in range(2))
    tied.weight = head.weight
    return Net(several, blocks=blocks, head=head, tied=tied)


LAYERS = ["blocks.0", "blocks.1", "attention 1", "matmul 1", "matmul 2", "head"]


@parametrize("how", "eager compiled converted whole".split())
def test_layers_have_their_names_compiled_or_not(how):
    model, x = made(), randn(2, 5, 8)
    seen = fp8.stats(model, every=2)
    if how == "converted":
        fp8.convert(model, "unit")

    def block(x):
        with fp8.autocast("unit"):
            return model(x)

    run = model if how == "converted" else block
    if how == "compiled":
        model.compile(backend="eager", fullgraph=True)
    if how == "whole":
        run = in_one_graph(block, "eager")
    for _ in range(4):
        with seen:
            y = run(x)
        y.sum().backward()
    names = [name for name in LAYERS if how != "converted" or " " not in name]
    rows = by_operand(seen)
    assert (
        list(dict.fromkeys(layer for layer, operand in rows if operand != "grad"))
        == names
    )
    assert (
        rows["head", "input"].elements == 2 * 2 * 2 * 5 * 8
    )  # two passes, and it is used twice
    assert rows["blocks.0", "grad"].elements == 2 * 2 * 5 * 8


@parametrize("function", CALLS)
def test_every_product_is_counted(function):
    row = CALLS[function]
    tensors = [t.requires_grad_() for t in operands(row)]
    tensors = [tensors[0] * 1, *tensors[1:]]
    seen = fp8.stats(nn.Identity())
    with seen, block("delayed"):
        function(*row.before, *tensors, **row.kwargs).sum().backward()
    (layer,) = {row.layer for row in seen.rows()}
    assert layer.endswith(" 1")
    assert len(seen.rows()) == len([kind for kind in row.kinds if kind != "none"]) + 1


def test_what_is_computed_does_not_change():
    model, x, results = made(), randn(2, 5, 8), []
    for seen in (nullcontext(), fp8.stats(model, every=1)):
        for _ in range(2):
            torch.manual_seed(0)
            with fp8.autocast("nvfp4"), seen:
                y = model(x)
            results.append([y, *torch.autograd.grad(y.sum(), model.parameters())])
    for other in results[1:]:
        assert_same(results[0], other)


def test_sampling():
    layer = nn.Linear(4, 4)
    seen = fp8.stats(layer, every=3)
    counts = []
    for _ in range(7):
        with seen, fp8.autocast("unit"):
            layer(randn(2, 4))
        counts.append(seen.rows()[0].elements // 8)
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    with pytest.raises(KeyError), seen:
        raise KeyError
    with fp8.autocast("unit"):
        layer(randn(2, 4))  # outside of the block nothing is counted
    assert seen.rows()[0].elements == 3 * 8


def test_an_empty_table_says_why():
    layer, seen = nn.Linear(4, 4), fp8.stats(nn.Linear(4, 4))
    assert "no pass was recorded" in str(seen)
    with refuses(r"in the block of fp8\.stats", RuntimeError):
        seen.rows()
    with seen:
        layer(randn(2, 4))  # not under a recipe
    assert "no cast in the recorded passes" in str(seen)
    assert seen.rows() == []


def test_refusals():
    for fields in ({"every": 0}, {"sample": 0}, {"every": 1.5}):
        with refuses("a whole number from 1", (TypeError, ValueError)):
            fp8.stats(nn.Linear(2, 2), **fields)
    seen = fp8.stats(nn.Linear(2, 2))

    def inside(x):
        with seen:
            return x + 1

    with refuses("Unsupported context manager", Exception):
        in_one_graph(inside, "eager")(randn(2))


@parametrize("compiled", [False, True])
@parametrize("reentrant", [False, True])
@parametrize("recipe", ["tensor", "mxfp8", "nvfp4"])
def test_recomputed_elements_count_once(recipe, reentrant, compiled):
    """Forward and backward pass inside: the rows are those without checkpoints."""
    model = linears(32, 32, nn.GELU, 32)
    fp8.convert(model, recipe, backend="simulate")
    x = torch.randn(8, 32, requires_grad=True)

    def run(x, checkpointed):
        for _ in range(2):
            x = (
                checkpoint(model, x, use_reentrant=reentrant)
                if checkpointed
                else model(x)
            )
        return x.square().sum()

    rows = []
    for checkpointed in (False, True):
        step = torch.compile(run, backend="eager") if compiled else run
        seen = fp8.stats(model)
        torch.manual_seed(1)
        with seen:
            step(x, checkpointed).backward()
        rows.append(by_operand(seen))
    assert rows[0] == rows[1]
    operands = {operand for _, operand in rows[0]}
    assert {"input", "weight", "grad"} <= operands


def test_recomputed_products_of_values_count_once():
    def square(x):
        return (x @ x.mT).sum()

    x = torch.randn(2, 8, 8, requires_grad=True)
    seen = {}
    for checkpointed in (False, True):
        seen[checkpointed] = fp8.stats(nn.Identity())
        with fp8.autocast("tensor"), seen[checkpointed]:
            if checkpointed:
                contexts = fp8.checkpoint_contexts
                y = checkpoint(square, x, use_reentrant=False, context_fn=contexts)
            else:
                y = square(x)
            y.backward()
    assert by_operand(seen[True]) == by_operand(seen[False])
    assert len(by_operand(seen[True])) == 3
