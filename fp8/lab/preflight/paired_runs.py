"""Paired training runs: the gap between a candidate and the reference, and a sequential test of it.

A candidate and the reference train from the same weights on the same batches with the same random
numbers, so what differs between seeds cancels in the difference of their losses.

After each pair the test looks at the mean difference of n seeds. One end of the interval at n has
the error ``ERROR / (n (n - 1))``. The sum over n = 2, 3, ... telescopes to ERROR, so by the union
bound an end that was ever seen excludes the gap with a probability of at most ERROR, whenever the
test stops. A verdict reads one end: "as the reference" and "better" are wrong only if the upper
end is too low, "worse" only if the lower end is too high. Differences are taken as normal and
independent between seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from .findings import Candidate, Run

REFERENCE = "reference"
"""The name of the runs in the model's own precision."""

ERROR = 0.05
"""The largest probability of a false verdict about a candidate. An interval covers the gap at all
looks together with probability ``1 - 2 * ERROR``."""

TAIL = 1 / 3
"""The share of the steps, at the end of a run, over which differences of losses are averaged. On a
GPT of two layers, 32 wide, over 10 pairs of 150 steps, the deviation of the mean difference between
pairs was 0.0109 over the last tenth of the steps, 0.0089 over a fifth, 0.0071 over a third, 0.0064
over half, and 0.0102 for the held-out loss at the end; the mean was 0.005 for each."""


class Gap(NamedTuple):
    """A loss minus the reference's: mean over the seeds, and the ends of an interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def half_width(self) -> float:
        """Half the width of the interval; inf for one seed."""
        return (self.high - self.low) / 2 if math.isfinite(self.mean) else math.inf


# Student's t


def _central(t: float, freedom: int) -> float:
    """The probability that Student's t is within plus and minus ``t`` (Abramowitz and Stegun,
    26.7.3 and 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def student(freedom: int, error: float) -> float:
    """The value that Student's t with this many degrees of freedom exceeds with probability
    ``error``, below 1/2."""
    low, high = 0.0, 1.0
    while 1 - _central(high, freedom) > 2 * error:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        if 1 - _central(middle, freedom) > 2 * error:
            low = middle
        else:
            high = middle
    return high


def half_width(values: Sequence[float], error: float = 0.025) -> float:
    """Half the width of the interval of the mean of two or more values, each end of which has this
    error; by default the 95 % interval."""
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return student(len(values) - 1, error) * deviation


def error_at(seeds: int) -> float:
    """The error of one end of the interval of the sequential test after this many seeds."""
    return ERROR / (seeds * (seeds - 1))


def seeds_needed(gap: Gap, tolerance: float) -> int:
    """About how many seeds give the sequential test an interval with a half-width of ``tolerance``,
    by the deviation of those so far."""
    ratio = gap.half_width / student(gap.seeds - 1, error_at(gap.seeds)) / tolerance
    deviation, count = ratio * math.sqrt(gap.seeds), gap.seeds
    while student(count - 1, error_at(count)) * deviation / math.sqrt(count) > 1 and count < 1000:
        count += max(count // 10, 1)
    return count


# Gaps


def gap(runs: Sequence[Run], name: str) -> Gap | None:
    """The difference of held-out losses, with its 95 % interval (Student's t), over the seeds that
    a candidate shares with the reference, without those with which the reference diverged. None
    without seeds; infinite if a run of the candidate diverged."""
    return _gap(runs, name, lambda run, other: run.held_out - other.held_out, lambda n: 0.025)


def sequential_gap(runs: Sequence[Run], name: str) -> Gap | None:
    """As `gap`, of `end_difference` and with the interval of the sequential test."""
    return _gap(runs, name, end_difference, error_at)


def _gap(
    runs: Sequence[Run],
    name: str,
    difference: Callable[[Run, Run], float],
    error: Callable[[int], float],
) -> Gap | None:
    references = {r.seed: r for r in runs if r.name == REFERENCE and math.isfinite(r.held_out)}
    pairs = [(r, references[r.seed]) for r in runs if r.name == name and r.seed in references]
    if not pairs:
        return None
    n = len(pairs)
    if not all(math.isfinite(run.held_out) for run, _ in pairs):
        return Gap(math.inf, math.inf, math.inf, n)
    values = [difference(run, reference) for run, reference in pairs]
    mean = statistics.fmean(values)
    half = half_width(values, error(n)) if n > 1 else math.inf
    return Gap(mean, mean - half, mean + half, n)


def end_difference(run: Run, reference: Run) -> float:
    """How much larger the loss of a run is at the end: the mean difference of the training losses
    of the last steps, batch by batch. Each is computed before the step on its batch."""
    count = max(round(TAIL * len(reference.losses)), 1)
    pairs = zip(run.losses[-count:], reference.losses[-count:], strict=True)
    return statistics.fmean(a - b for a, b in pairs)


def outcome(gap: Gap | None, tolerance: float) -> str:
    """What a gap says, in the words of `Candidate.outcome`."""
    if gap is None:
        return "not trained"
    if math.isinf(gap.mean):
        return "diverges"
    if gap.low > tolerance:
        return "worse"
    if gap.high < 0:
        return "better"
    narrow = gap.mean <= tolerance and gap.half_width <= tolerance
    return "as the reference" if gap.high <= tolerance or narrow else "not decided"


def is_decided(gap: Gap | None, tolerance: float) -> bool:
    """Whether more seeds are not needed: the outcome is known."""
    return outcome(gap, tolerance) not in ("not trained", "not decided")


def compare(candidates: Iterable[Candidate], runs: Sequence[Run], tolerance: float) -> None:
    """Writes gaps, intervals and outcomes of ``runs`` into the candidates."""
    for candidate in candidates:
        measured = sequential_gap(runs, candidate.name)
        candidate.outcome = outcome(measured, tolerance)
        if measured is not None:
            finite = [value if math.isfinite(value) else None for value in measured[:3]]
            candidate.gap, candidate.low, candidate.high = finite
            candidate.seeds = measured.seeds


class OutOfTime(Exception):
    """A training run was ended because the budget is spent."""


def train_pairs(
    names: Sequence[str],
    runs: list[Run],
    train: Callable[[str, int], Run],
    *,
    tolerance: float,
    max_seeds: int,
    has_time: Callable[[Collection[str]], bool],
    on_run: Callable[[], object] = lambda: None,
) -> None:
    """Trains until every candidate is decided, has all seeds, or has no time left. The next run is
    that of the candidate with the widest interval; of several, that with the fewest seeds.

    runs: what has been trained so far; extended in place. train: trains a candidate, or REFERENCE,
    with a seed; may raise `OutOfTime`. has_time: asked before with the names of the runs of a pair
    that are missing. on_run: called after each run.
    """
    trained = {(run.name, run.seed) for run in runs}

    def missing(name: str) -> list[tuple[str, int]]:
        seeds = (s for s in range(max_seeds) if (name, s) not in trained)
        pairs = ([(REFERENCE, s), (name, s)] for s in seeds)
        return [run for run in next(pairs, []) if run not in trained]

    def urgency(name: str) -> tuple[float, int]:
        measured = sequential_gap(runs, name)
        return (-measured.half_width, measured.seeds) if measured else (-math.inf, 0)

    candidates = list(names)
    while True:
        candidates = [
            name
            for name in candidates
            if not is_decided(sequential_gap(runs, name), tolerance)
            and missing(name)
            and has_time([each for each, _ in missing(name)])
        ]
        if not candidates:
            return
        for name, seed in missing(min(candidates, key=urgency)):
            try:
                runs.append(train(name, seed))
            except OutOfTime:
                return
            trained.add((name, seed))
            on_run()
