"""Activation checkpointing under `fp8.autocast`: cast in the recomputation too, or refused."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import fp8
import unit_scaling as uu
from tests.shared import (
    assert_same,
    in_one_graph,
    linears,
    normal,
    parametrize,
    randn,
    refuses,
)


@parametrize("backend", ["simulate", pytest.param("native", marks=pytest.mark.native)])
def test_the_error_names_the_remedy(backend):
    """Where the segment ends with a product, which reads what is recomputed first."""
    block = linears(16, 16, nn.GELU, 16)
    with fp8.autocast("tensor", backend=backend):
        y = checkpoint(block, normal(16, 16), use_reentrant=False)
    with refuses(r"context_fn=fp8\.checkpoint_contexts", CheckpointError):
        y.sum().backward()


CHECKPOINTED = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Conv1d(5, 5, 3))


@parametrize("compiled", [True, False])
def test_checkpointing_with_the_context_or_compiled_is_cast(compiled):
    x = normal(5, 8)
    options = {} if compiled else {"context_fn": fp8.checkpoint_contexts}

    def run():
        with fp8.autocast("unit"):
            return checkpoint(CHECKPOINTED, x, use_reentrant=False, **options)

    with fp8.autocast("unit"):
        expected = CHECKPOINTED(x)
    assert not torch.equal(expected, CHECKPOINTED(x))
    if compiled:
        run = in_one_graph(run)
    parameters = list(CHECKPOINTED.parameters())
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    got = torch.autograd.grad(run().square().sum(), parameters)
    assert_same(got, wanted)
    assert_same(run(), expected)


@parametrize("segment", [CHECKPOINTED, uu.Linear(8, 8)], ids=["torch", "uu"])
def test_reentrant_checkpointing_is_refused_by_name(segment):
    """Products of modules of unit_scaling do not come by the block's mode."""
    x = randn(5, 8)
    with fp8.autocast("unit"), refuses(r"use_reentrant=True.*context_fn", RuntimeError):
        checkpoint(segment, x, use_reentrant=True)
    with torch.no_grad(), fp8.autocast("unit"):  # nothing is recomputed
        segment(x)


@parametrize("around", [contextlib.nullcontext, lambda: fp8.autocast(enabled=False)])
def test_outside_of_a_block_and_in_one_that_is_off_the_contexts_do_nothing(around):
    given = {"use_reentrant": False, "context_fn": fp8.checkpoint_contexts}
    x = normal(5, 8)
    with around():
        y = checkpoint(CHECKPOINTED, x, **given)
    assert_same(y, CHECKPOINTED(x))
    y.sum().backward()


@parametrize("reentrant", [False, True])
def test_checkpointing_of_the_block_itself(reentrant):
    """A function that contains the block can be checkpointed: it opens the block again."""
    layer, x = nn.Linear(8, 8), randn(5, 8)

    def run(x):
        with fp8.autocast("unit"):
            return layer(x)

    grads = []
    for y in (run(x), checkpoint(run, x, use_reentrant=reentrant)):
        layer.zero_grad()
        y.square().sum().backward()
        grads.append(layer.weight.grad)
    assert_same(*grads)
