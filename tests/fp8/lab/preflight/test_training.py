"""Paired runs: the same weights and batches, and steps equal to a loop by hand."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import fp8
from fp8.common.step import seeded
from fp8.lab.preflight.training import Problem, Setup, loss_of, train, under
from tests.shared import assert_same, descend, parametrize, refuses

from .problems import Classifier, batches, setup


def by_hand(seed, steps, recipe=None):
    """The losses of a loop, and what it trained."""
    torch.manual_seed(seed)
    made = setup(seed)
    if recipe:
        fp8.convert(made.model, recipe, backend="simulate")
    losses = (made.model(*batch) for batch in made.batches[:steps])
    return descend(made.optimizer, losses), made


@parametrize("recipe, seed", [(None, 0), ("tensor", 3)])
def test_a_run_is_a_plain_loop(recipe, seed):
    prepare = under(fp8.Policy(recipe)) if recipe else None
    run, _ = train(Problem(setup, 4, 2), "x", seed, prepare)
    losses, made = by_hand(seed, 4, recipe)
    assert run.losses == losses
    made.model.eval()
    held = [made.model(*batch).item() for batch in made.batches[4:6]]
    assert run.held_out == pytest.approx(sum(held) / 2, abs=1e-12)


def test_a_model_is_copied_and_seeds_reorder_its_batches():
    model = Classifier()
    before = [p.clone() for p in model.parameters()]
    data = batches(12)
    problem = Problem(Setup(model, data), 8, 4)
    first, second = problem.start(0), problem.start(1)
    assert_same(before, [*model.parameters()])
    order, other = (list(map(id, start.batches)) for start in (first, second))
    assert order == list(map(id, data[:8])) != other
    assert sorted(order) == sorted(other)
    assert list(map(id, second.held_out)) == list(map(id, data[8:]))
    (group,) = first.optimizer.param_groups
    assert group["params"][0] is next(first.model.parameters())


def test_a_function_is_called_once_per_seed_with_its_seed():
    seen = []

    def make(seed):
        seen.append((seed, torch.initial_seed()))
        return setup(seed)

    problem = Problem(make, 2, 2)
    for seed in (0, 1, 1, 0):
        problem.start(seed)
    assert seen == [(0, 0), (1, 1)]


def from_an_iterator():
    data = iter(batches(100))
    return lambda: Setup(Classifier(), data)


def from_one_model():
    model = Classifier()

    def make(seed):
        for layer in model.modules():
            getattr(layer, "reset_parameters", lambda: None)()
        return Setup(model, batches(6, seed))

    return make


@parametrize("source", [from_an_iterator, from_one_model])
def test_runs_of_a_seed_are_paired_in_whichever_order_they_come(source):
    problem = Problem(source(), 4, 2)
    first = {seed: train(problem, "x", seed)[0] for seed in (0, 1, 2)}
    again = {seed: train(problem, "x", seed)[0] for seed in (2, 0, 1)}
    for seed, run in first.items():
        assert (run.losses, run.held_out) == (again[seed].losses, again[seed].held_out)
        assert run.data == again[seed].data
    assert len({tuple(run.losses) for run in first.values()}) == 3
    assert len({run.data for run in first.values()}) == 3


def test_batches_that_share_memory_are_refused():
    x, y = torch.empty(32, 16), torch.empty(32, dtype=torch.int64)

    def refilled():
        for values, labels in batches(6):
            yield x.copy_(values), y.copy_(labels)

    with refuses("a batch of seed 0 was overwritten after it was drawn"):
        train(Problem(Setup(Classifier(), refilled()), 4, 2), "x")


@parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_random_numbers_of_every_generator_are_those_of_the_seed(draw):
    """Models drop layers and mask inputs, and data is made, by any of the three."""

    class Masked(Classifier):
        def forward(self, x, y):
            return super().forward(x, y) * (1 + draw())

    def made(seed):
        return Setup(Masked(), [(x * draw(), y) for x, y in batches(6, seed)])

    with seeded(7):
        expected = [draw() for _ in range(3)]
    with seeded(7):
        problem = Problem(made, 3, 2)
        first = train(problem, "x", 1)[0]
        train(problem, "x", 0)
        again = train(problem, "x", 1)[0]
        assert (first.losses, first.held_out) == (again.losses, again.held_out)
        assert [draw() for _ in range(3)] == expected


def test_a_run_ends_at_a_loss_that_is_not_finite():
    steps = iter([1, 1, math.nan])
    given = Setup(Classifier(), batches(8), lambda y: y * next(steps))
    run, _ = train(Problem(given, 5, 2), "x")
    assert len(run.losses) == 3
    assert math.isnan(run.held_out)


def test_snapshots_hold_weights_moments_and_the_next_batch():
    problem = Problem(setup, 4, 2)
    _, (first, last) = train(problem, "x", snapshots=(2, 4))
    _, made = by_hand(0, 2)
    assert first.step == 2
    for name, parameter in made.model.named_parameters():
        assert_same(first.model.get_parameter(name), parameter)
        moment = made.optimizer.state[parameter]["exp_avg_sq"]
        assert_same(first.second_moments[name], moment)
    assert_same(first.batch[0], made.batches[2][0])
    assert_same(last.batch[0], made.batches[0][0])


BAD = {
    "preflight needs an nn.Module": (lambda: Setup(3, []), TypeError),
    "batches must be an iterable": (lambda: Setup(Classifier(), 3), TypeError),
    "loss must be a function": (lambda: Setup(Classifier(), [], 3), TypeError),
    "optimizer must be": (lambda: Setup(Classifier(), [], None, 3), TypeError),
    "none of the model's parameters": (
        lambda: Setup(
            Classifier(), [], None, torch.optim.SGD(Classifier().parameters(), lr=0.1)
        ),
        ValueError,
    ),
    r"high precision, but first.weight is stored in e4m3: .* before fp8.initialize": (
        lambda: Setup(fp8.initialize(Classifier(), None, "O3")[0], batches(3)),
        ValueError,
    ),
    "one element": (
        lambda: loss_of(nn.Linear(4, 4), torch.randn(2, 4), lambda y: y),
        ValueError,
    ),
    "the model returns it": (
        lambda: loss_of(nn.Linear(4, 4), torch.randn(2, 4), None),
        ValueError,
    ),
}


@parametrize("message", BAD)
def test_bad_input(message):
    call, error = BAD[message]
    with refuses(message, error):
        call()
