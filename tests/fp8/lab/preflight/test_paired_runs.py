"""Gaps, their intervals, the error of the sequential test, and when a comparison ends."""

import math
import statistics

import pytest
import torch

from fp8.lab.preflight.findings import Candidate, Run
from fp8.lab.preflight.paired_runs import (
    ERROR,
    LOOKS,
    REFERENCE,
    TAIL,
    Gap,
    OutOfTime,
    chance_of,
    compare,
    gap,
    outcome,
    sequential_gap,
    student,
    train_pairs,
)
from tests.shared import pairs, parametrize, seeded

TARGET = 0.01


def runs(**losses):
    """Runs that have one loss at every step and on the held-out batches."""
    return [
        Run(n, seed, [x] * 3, x)
        for n, held in losses.items()
        for seed, x in enumerate(held)
    ]


@parametrize(
    "freedom, error, quantile",
    [
        *((1, 0.025, 12.706), (2, 0.025, 4.303), (3, 0.025, 3.182), (12, 0.025, 2.179)),
        *((5, 0.05, 2.015), (4, 0.005, 4.604), (7, 0.0005, 5.408), (120, 0.025, 1.980)),
    ],
)
def test_quantiles_are_those_of_a_table(freedom, error, quantile):
    """Of any table of Student's t, to three digits after the point."""
    assert student(freedom, error) == pytest.approx(quantile, abs=6e-4)


def test_the_sequential_gap_is_of_the_last_batches():
    """Of 9 steps the last 3; batch by batch, so that their own losses cancel."""
    assert round(9 * TAIL) == 3
    reference = [9.0, 8, 7, 6, 5, 4, 1, 5, 3]
    made = [Run(REFERENCE, 0, reference, 2.0)]
    made += [Run("a", 0, [*([0.0] * 6), 1.1, 5.2, 3.3], 9.0)]
    measured = sequential_gap(made, "a")
    assert measured.mean == pytest.approx(0.2)
    assert math.isinf(measured.half_width)


def test_the_interval_is_that_of_the_last_look():
    """Of 5 pairs the first 4, whose end errs with ERROR / 6."""
    values = [0.1, 0.2, 0.3, 0.4, 7.0]
    measured = sequential_gap(runs(reference=[0.0] * 5, a=values), "a")
    assert (measured.mean, measured.seeds) == (pytest.approx(0.25), 4)
    deviation = statistics.stdev(values[:4])
    assert measured.half_width == pytest.approx(student(3, ERROR / 6) * deviation / 2)


def said(differences, looks=(3, 4, 6, 8, 12), chance=None):
    """The outcome at the look that decides, of each row of differences."""
    words = ["not decided"] * len(differences)
    for n in looks:
        half = student(n - 1, LOOKS[n]) * differences[:, :n].std(1) / math.sqrt(n)
        limits = 0 * half if chance is None else chance
        rows = pairs(
            differences[:, :n].mean(1).tolist(),
            half.tolist(),
            limits.tolist(),
        )
        for i, (mean, h, limit) in enumerate(rows):
            if words[i] == "not decided":
                words[i] = outcome(Gap(mean, mean - h, mean + h, n), TARGET, limit)
    return words


@parametrize("deviation", [0.003, 0.03])
@parametrize("true", [0.0, 2 * TARGET])
def test_false_verdicts_are_rarer_than_the_error(true, deviation):
    """Over synthetic differences of up to 12 pairs: gaps of 0 that are called "worse", and of twice
    the target that are called as good."""
    draw = seeded(round(1e4 * (true + deviation)))
    words = said(true + deviation * torch.randn(1500, 12, generator=draw))
    wrong = ("worse",) if true < TARGET else ("as the reference", "better")
    false, decided = (
        sum(w in wrong for w in words),
        sum(w != "not decided" for w in words),
    )
    assert false <= ERROR * 1500 + 3 * math.sqrt(
        ERROR * 1500
    )  # three deviations of the count
    assert decided >= 0.9 * 1500 or deviation > TARGET


def test_chance_is_the_deviation_of_the_reference_over_seeds():
    assert chance_of(runs(reference=[1.0, 2.0, 4.0, math.nan])) == pytest.approx(
        1.527525
    )
    assert chance_of(runs(reference=[1.0, 2.0], a=[3.0])) == 0


@parametrize(
    "measured, words",
    [
        (None, "not trained"),
        (Gap(math.inf, math.inf, math.inf, 1), "diverges"),
        (Gap(0.5, 0.4, 0.6, 3), "worse"),
        (Gap(0.001, -0.004, 0.006, 3), "as the reference"),
        (Gap(-0.3, -0.4, -0.2, 3), "better"),
        (Gap(0.02, -0.2, 0.24, 2), "not decided"),
        (Gap(0.001, -0.015, 0.017, 5), "within chance"),
        (Gap(0.0, -math.inf, math.inf, 1), "not decided"),
        (Gap(0.05, -0.1, 0.19, 6), "within chance"),
        (Gap(0.1, 0.05, 0.15, 6), "worse"),
    ],
)
def test_outcomes(measured, words):
    assert outcome(measured, TARGET, chance=0.2) == words
    if words == "within chance":
        assert outcome(measured, TARGET) == "not decided"


def test_runs_that_diverged():
    """Of the candidate: no finite gap. Of the reference: the seed does not count."""
    candidate = Candidate("a", "r")
    compare([candidate], runs(reference=[1.0], a=[math.nan]), TARGET)
    assert (candidate.outcome, candidate.gap, candidate.seeds) == ("diverges", None, 1)
    measured = gap(runs(reference=[1.0, math.nan, 2.0], a=[1.5, 1.5, 2.5]), "a")
    assert (measured.mean, measured.low, measured.seeds) == (0.5, 0.5, 2)
    assert gap(runs(reference=[math.nan], a=[1.0]), "a") is None


def trained(losses, *, max_seeds=8, has_time=lambda names: True, before=()):
    """losses: candidate -> function of a seed; the reference's are 0."""
    made, calls = list(before), []

    def train(name, seed):
        calls.append((name, seed))
        loss = losses.get(name, lambda seed: 0.0)(seed)
        return Run(name, seed, [loss] * 3, loss)

    arguments = {"tolerance": TARGET, "max_seeds": max_seeds, "has_time": has_time}
    train_pairs(list(losses), made, train, **arguments)
    return made, calls


def test_seeds_end_when_all_are_decided():
    _, calls = trained(
        {"good": lambda s: 1e-5 * (s % 2), "bad": lambda s: 1 + 0.001 * s}
    )
    assert [seed for name, seed in calls if name == "bad"] == [0, 1, 2]
    assert max(seed for _, seed in calls) == 2


def test_the_candidate_nearest_to_a_good_verdict_is_next():
    """Each gets three pairs; then the candidate whose upper end is the lowest has all seeds."""
    losses = {"noisy": lambda s: 0.1 * (-1) ** s, "quiet": lambda s: 0.02 * (-1) ** s}
    _, calls = trained(losses, max_seeds=5)
    names = [name for name, _ in calls if name != REFERENCE]
    assert names == ["noisy"] * 3 + ["quiet"] * 5 + ["noisy"] * 2


def test_no_pair_follows_the_last_look():
    before = runs(
        reference=[0.0] * max(LOOKS), a=[(-1.0) ** i for i in range(max(LOOKS))]
    )
    assert outcome(sequential_gap(before, "a"), TARGET) == "not decided"
    assert trained({"a": lambda s: 0.0}, max_seeds=1000, before=before)[1] == []


def test_no_pair_begins_that_has_no_time():
    """Neither its candidate nor its reference; a cheaper candidate goes on."""
    losses = {"slow": lambda s: 0.5 * s, "fast": lambda s: 0.1 * s}
    _, calls = trained(losses, max_seeds=2, has_time=lambda names: "slow" not in names)
    assert calls == [(REFERENCE, 0), ("fast", 0), (REFERENCE, 1), ("fast", 1)]
    assert trained(losses, has_time=lambda names: False) == ([], [])


def test_a_run_that_is_ended_is_not_counted():
    def late(seed):
        raise OutOfTime

    made, calls = trained({"a": late})
    assert calls == [(REFERENCE, 0), ("a", 0)]
    assert [run.name for run in made] == [REFERENCE]
