"""The frontier against all subsets, and its knee."""

import itertools

import torch

import fp8
from fp8.lab.preflight.search import (
    LayerError,
    choose,
    frontier,
    knee,
    name_of,
    shares,
)
from fp8.lab.trace import Product
from tests.shared import pairs, parametrize, seeded


def scores(count, seed):
    generator = seeded(seed)
    errors = torch.rand(count, generator=generator).square().tolist()
    parts = torch.rand(count, generator=generator)
    parts = (parts / parts.sum()).tolist()
    rows = pairs(errors, parts)
    return [LayerError(f"l{i}", e, p) for i, (e, p) in enumerate(rows)]


@parametrize("seed", range(5))
def test_no_subset_of_layers_is_better_than_a_point_of_the_frontier(seed):
    given = scores(8, seed)
    points = frontier(given)
    assert len(points) == 9
    for kept in itertools.product([False, True], repeat=8):
        cast = [s for s, keep in pairs(given, kept) if not keep]
        share, error = sum(s.share for s in cast), sum(s.squared_error for s in cast)
        assert not any(
            share >= p.share - 1e-12 and error < p.squared_error - 1e-12 for p in points
        )


def test_the_knee_keeps_the_one_bad_layer():
    given = [LayerError("bad", 1.0, 0.1)]
    given += [LayerError(f"good{i}", 1e-4, 0.1) for i in range(9)]
    assert knee(frontier(given)).kept == ["bad"]


def test_the_knee_is_inside_if_no_layer_is_much_worse():
    """Errors 2, 1, 1: all FLOPs but the first layer's leave half of the squared error."""
    given = [LayerError(name, e, 0.3) for name, e in pairs("abc", (2, 1, 1))]
    assert knee(frontier(given)).kept == ["a"]


@parametrize(
    "errors, kept", [((0.8, 0.4, 0.2, 0.1), 3), ((0.1,) * 4, 1), ((0.8,) * 4, None)]
)
def test_the_choice_is_the_first_that_is_measured_to_be_fine(errors, kept):
    """A frontier keeps one layer more at each point; a snapshot is worse than all."""

    def probe(factor):
        return lambda policy: factor * errors[len(policy.rules) - 1]

    layers = [LayerError(name, 1.0, 0.2) for name in "abcde"]
    chosen = choose(fp8.RECIPES["row"], layers, [probe(0.5), probe(1.0)])
    assert chosen == (
        knee(frontier(layers)) if kept is None else frontier(layers)[kept]
    )


def test_shares_leave_out_what_cannot_be_cast_but_count_it():
    rows = [
        Product("a", "linear", 2, 3, 4),
        Product("a", "linear", 2, 3, 4),
        Product("b", "matmul", 2, 3, 4, why_not="no weight"),
        Product("c", "linear", 2, 3, 4),
    ]
    assert shares(rows) == {"a": 0.5, "c": 0.25}


def test_names():
    assert name_of("r", []) == "r"
    assert name_of("r", ["a", "b"]) == "r except a and b"
    assert name_of("r", ["a", "b", "c"]) == "r except a and 2 more"
