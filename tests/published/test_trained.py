"""`benchmarks.papers`: the casts of its runs, and what its rows say."""

import math

import pytest

from benchmarks import papers
from benchmarks.papers import (
    NVIDIA,
    QUARTET2,
    Claim,
    backward_only,
    claim_row,
    forward_only,
)
from fp8.lab.preflight.training import Problem
from tests.fp8.lab.preflight.test_paired_runs import runs
from tests.shared import parametrize


@parametrize("recipe", [NVIDIA, QUARTET2], ids=lambda recipe: recipe.name)
def test_each_product_is_cast_in_one_of_the_halves(recipe):
    forward, backward = forward_only(recipe), backward_only(recipe)
    assert forward.forward == recipe.forward
    assert {*forward.grad_input, *forward.grad_weight} == {None}
    assert backward.forward == (None, None)
    assert (backward.grad_input, backward.grad_weight) == (
        recipe.grad_input,
        recipe.grad_weight,
    )


def test_a_late_switch_changes_the_last_third(monkeypatch):
    """And no step before it."""
    monkeypatch.setattr(papers, "STEPS", 8)
    problem = Problem(papers.setup, 8, 2)
    names = ("nvfp4_nvidia", papers.LATE_FORWARD, papers.LATE_BACKWARD)
    whole, *late = (papers.trained(problem, name, 0).losses for name in names)
    for losses in late:
        assert losses[:6] == whole[:6]
        assert losses[6:] != whole[6:]


@parametrize(
    "larger, smaller, published, order, ratio",
    [
        ([0.3, 0.31, 0.32], [0.1, 0.11, 0.12], 3.0, "seen", 2.82),
        ([0.1, 0.11, 0.12], [0.3, 0.31, 0.32], 3.0, "opposite", 0.35),
        ([0.3, 0.2, 0.2], [0.2, 0.2, 0.2001], 3.0, "not seen", 1.17),
        ([0.3, 0.1, 0.2], [-0.1, 0.2, 0.1], 3.0, "not seen", None),
    ],
)
def test_orders_and_ratios(larger, smaller, published, order, ratio):
    row = claim_row(
        Claim("paper", "a", "b", published),
        dict(enumerate(larger)),
        dict(enumerate(smaller)),
    )
    assert (row["order"], row.get("ratio")) == (order, ratio)
    assert row["difference"] == pytest.approx(
        sum(larger) / 3 - sum(smaller) / 3, abs=1e-4
    )


def test_rows_are_of_runs_with_two_seeds():
    made = runs(reference=[1.0, 2.0], nvfp4_nvidia=[1.2, 2.4], quartet2=[math.nan])
    (row,) = papers.rows(made)
    assert (row["name"], row["gap"], row["seeds"]) == ("nvfp4_nvidia", 0.3, 2)
