"""Gradients of accumulated calls are those of the one large batch."""

import copy
import threading

import pytest
import torch
from torch.nn import functional as F

import unit_scaling as uu
from tests.shared import assert_close, in_one_graph, parametrize, refuses
from tests.threads import together
from unit_scaling import functional as U
from unit_scaling.rules.batch import row_scale

CALLS, BATCH, VOCAB = 4, 3, 11


def decoder():
    return uu.TransformerDecoder(8, VOCAB, layers=1, heads=2)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def accumulated(model, tokens, calls, loss=U.cross_entropy, divide=1):
    """The gradients after `calls` backward passes, each over a part of the examples."""
    model = copy.deepcopy(model)
    for part in tokens.chunk(calls):
        value = loss(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        (value / divide).backward()
    return gradients(model)


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (CALLS * BATCH, 6))


def in_one_process(model, tokens):
    """The mean of the gradients of each part, as DDP makes it."""
    ranks = [accumulated(model, part, 1) for part in tokens.chunk(CALLS)]
    return {name: torch.stack([r[name] for r in ranks]).mean(0) for name in ranks[0]}


#: How a batch is divided -> the block, the loss, the gradients.
DIVIDED = {
    "a sum of sums": ({}, U.cross_entropy, lambda m, t: accumulated(m, t, CALLS)),
    "a mean of means": (
        {},
        F.cross_entropy,
        lambda m, t: accumulated(m, t, CALLS, loss=F.cross_entropy, divide=CALLS),
    ),
    "averaged processes": ({"averaged_over": CALLS}, U.cross_entropy, in_one_process),
}


@parametrize("how", DIVIDED)
def test_gradients_are_those_of_the_whole_batch(how, tokens):
    block, loss, gradients_of = DIVIDED[how]
    model = decoder().double()
    whole = accumulated(model, tokens, 1, loss=loss)
    with uu.batch_multiplier(CALLS, **block):
        assert_close(gradients_of(model, tokens), whole)
    if not block:  # without the setting they are larger by sqrt(CALLS)
        larger = {n: g * CALLS**0.5 for n, g in whole.items()}
        assert_close(gradients_of(model, tokens), larger)


def test_compiled(tokens):
    """The factor is that of the call, not of the compilation."""
    model = decoder()
    compiled = in_one_graph(model, "eager")
    for n in (1, 16):
        with uu.batch_multiplier(n):
            model.zero_grad()
            compiled(tokens).sum().backward()
            fast = gradients(model)
            model.zero_grad()
            model(tokens).sum().backward()
            assert_close(fast, gradients(model))


def test_block():
    assert row_scale(4) == 0.5
    with uu.batch_multiplier(4, averaged_over=2), uu.batch_multiplier(9):
        assert row_scale(4) == 1 / 6
    with pytest.raises(KeyError), uu.batch_multiplier(4):
        raise KeyError
    assert row_scale(4) == 0.5
    assert row_scale(0) == 1.0


@parametrize("argument", ["n", "averaged_over"])
@parametrize("value, error", [(0, ValueError), (1.5, TypeError)])
def test_bad_numbers(argument, value, error):
    block = uu.batch_multiplier(**{"n": 1, argument: value})
    with refuses(f"{argument} must be a whole number from 1, got {value}", error):
        block.__enter__()


def test_all_threads_see_the_block():
    """What is checkpointed is computed again in a thread of autograd, on a GPU."""
    with uu.batch_multiplier(4):
        assert together(lambda: row_scale(16), lambda: row_scale(4)) == [1 / 8, 1 / 4]
    assert row_scale(16) == 1 / 4


def test_threads_with_blocks_see_their_own():
    barrier = threading.Barrier(2)

    def scale(n):
        with uu.batch_multiplier(n):
            barrier.wait(60)
            result = row_scale(1)
            barrier.wait(60)
        return result

    assert together(lambda: scale(4), lambda: scale(16)) == [1 / 2, 1 / 4]
    assert row_scale(1) == 1
