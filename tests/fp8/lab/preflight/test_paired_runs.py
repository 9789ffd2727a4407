"""Gaps, their intervals, and when a comparison ends."""

import math

import pytest

from fp8.lab.preflight.findings import Candidate, Run
from fp8.lab.preflight.paired_runs import (
    REFERENCE,
    Gap,
    compare,
    gap,
    outcome,
    prove,
    seeds_needed,
)


def runs(**losses):
    return [Run(name, seed, [], x) for name, held in losses.items() for seed, x in enumerate(held)]


def test_the_interval_is_students():
    """Of 1, 2, 4, 5: mean 3, standard deviation 1.8257, t(3) = 3.182 (any table)."""
    found = gap(runs(reference=[0.0] * 4, a=[1.0, 2.0, 4.0, 5.0]), "a")
    assert found.mean == 3
    assert found.high - found.mean == pytest.approx(3.182 * 1.825742 / 2, rel=1e-6)
    assert (found.low + found.high) / 2 == pytest.approx(3)


def test_runs_are_paired_by_seed():
    made = runs(reference=[1.0, 5.0, 9.0], a=[1.5, 5.5])
    assert gap(made, "a").mean == pytest.approx(0.5)
    assert gap(made, "a").seeds == 2
    assert gap(made, "b") is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "not trained"),
        (Gap(math.inf, math.inf, math.inf, 1), "diverges"),
        (Gap(0.5, 0.4, 0.6, 3), "worse"),
        (Gap(0.001, -0.004, 0.006, 3), "as the reference"),
        (Gap(-0.3, -0.4, -0.2, 3), "better"),
        (Gap(0.02, -0.1, 0.14, 2), "not decided"),
        (Gap(0.009, 0.001, 0.017, 5), "as the reference"),
        (Gap(0.012, 0.004, 0.020, 5), "not decided"),
        (Gap(0.0, -math.inf, math.inf, 1), "not decided"),
    ],
)
def test_outcomes(found, words):
    assert outcome(found, 0.01) == words


def test_a_diverged_run_has_no_finite_gap_in_the_candidate():
    candidate = Candidate("a", "r")
    compare([candidate], runs(reference=[1.0], a=[math.nan]), 0.01)
    assert (candidate.outcome, candidate.gap, candidate.seeds) == ("diverges", None, 1)


def test_a_seed_with_which_the_reference_diverged_does_not_count():
    made = runs(reference=[1.0, math.nan, 2.0], a=[1.5, 1.5, 2.5])
    assert gap(made, "a")[:2] == (0.5, 0.5)
    assert gap(made, "a").seeds == 2
    assert gap(runs(reference=[math.nan], a=[1.0]), "a") is None


def proved(losses, *, max_seeds=8, has_time=lambda name: True, before=()):
    made, calls = list(before), []

    def run(name, seed):
        calls.append((name, seed))
        return Run(name, seed, [], losses.get(name, lambda seed: 0.0)(seed))

    names = [name for name in losses if name != REFERENCE]
    prove(names, made, run, tolerance=0.01, seeds=range(max_seeds), has_time=has_time)
    return made, calls


def test_seeds_end_when_all_are_decided():
    _, calls = proved({"good": lambda s: 0.001 * (s % 2), "bad": lambda s: 1 + 0.001 * s})
    assert max(seed for name, seed in calls if name == "bad") == 1
    assert max(seed for _, seed in calls) < 7


def test_a_noisy_one_takes_all_seeds():
    _, calls = proved({"noisy": lambda s: (-1) ** s * 0.1}, max_seeds=4)
    assert [c for c in calls if c[0] == "noisy"] == [("noisy", s) for s in range(4)]


def test_runs_that_exist_are_not_repeated():
    before = [Run(REFERENCE, 0, [], 0.0), Run("a", 0, [], 0.0)]
    _, calls = proved({"a": lambda s: 0.0}, max_seeds=2, before=before)
    assert calls == [(REFERENCE, 1), ("a", 1)]


def test_it_stops_when_time_is_up():
    made, _ = proved({"a": lambda s: 0.5 * s}, has_time=lambda name: name == REFERENCE)
    assert [run.name for run in made] == [REFERENCE]


def test_the_seeds_that_an_interval_needs():
    """The half-width of n seeds is t * deviation / sqrt(n)."""
    found = gap(runs(reference=[0.0] * 4, a=[0.02, -0.02, 0.02, -0.02]), "a")
    deviation = 0.02 * (4 / 3) ** 0.5
    expected = math.ceil((2.179 * deviation / 0.01) ** 2)
    assert seeds_needed(found.low, found.high, 4, 0.01) == expected == 26
