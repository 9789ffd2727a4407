"""Paired training runs: the gap between a candidate and the reference, and a sequential test of it.

One end of the interval at the k-th look has the error ``ERROR / (k (k + 1))``. The sum over k
telescopes to ERROR, so by the union bound an end that was ever seen excludes the gap with a
probability of at most ERROR, whenever the test stops. What follows from it is on docs/preflight.md.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from .findings import Candidate, Run

# The name of the runs in the model's own precision.
REFERENCE = "reference"

# The largest probability of a false verdict about a candidate. An interval covers the gap at all
# looks together with probability 1 - 2 * ERROR.
ERROR = 0.05

# The share of the steps, at the end of a run, over which differences of losses are averaged. On a
# GPT of two layers, over 10 pairs of 150 steps, the deviation between pairs was 0.0109 over a tenth
# of the steps, 0.0089 over a fifth, 0.0071 over a third, 0.0064 over half.
TAIL = 1 / 3


class Gap(NamedTuple):
    """A loss minus the reference's: mean over the seeds, and the ends of an interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def _central(t: float, freedom: int) -> float:
    """The probability that Student's t is within plus and minus ``t``."""
    # Abramowitz and Stegun, 26.7.3 and 26.7.4: finite sums for whole degrees of freedom.
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) ** odd
    total = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (k - 1) / k * math.cos(angle) ** 2
    total *= math.sin(angle)
    if odd:
        return 2 / math.pi * (angle + total)
    return total


def student(freedom: int, error: float) -> float:
    """The value that Student's t with this many degrees of freedom exceeds with probability
    ``error``, below 1/2."""
    low = 0.0
    high = 1e4
    for _ in range(60):  # to the last bit
        middle = (low + high) / 2
        if 1 - _central(middle, freedom) > 2 * error:
            low = middle
        else:
            high = middle
    return high


def half_width(values: Sequence[float], error: float = 0.025) -> float:
    """Half the width of the interval of the mean of two or more values. error: one-sided error
    probability."""
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return student(len(values) - 1, error) * deviation


_SEEDS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LOOKS = {seeds: ERROR / (k * (k + 1)) for k, seeds in enumerate(_SEEDS, 1)}
"""The number of pairs at each look of the sequential test -> the error of an end there."""
FIRST_LOOK = min(LOOKS)


def seeds_needed(gap: Gap, tolerance: float) -> int:
    """About how many seeds give an interval with a half-width of ``tolerance``."""

    def width(seeds: int) -> float:
        """Half the width of the interval for a standard deviation of 1."""
        return student(seeds - 1, LOOKS[seeds]) / math.sqrt(seeds)

    deviation = gap.half_width / width(gap.seeds)
    narrow = (seeds for seeds in LOOKS if deviation * width(seeds) <= tolerance)
    return next(narrow, max(LOOKS))


def gap(runs: Sequence[Run], name: str) -> Gap | None:
    """The difference of held-out losses, with its 95 % interval, over the seeds that a candidate
    shares with the reference, without those with which the reference diverged. None without seeds;
    infinite if a run of the candidate diverged."""
    values = _differences(runs, name, lambda run, other: run.held_out - other.held_out)
    return _gap(values, 0.025 if len(values) > 1 else None)


def sequential_gap(runs: Sequence[Run], name: str) -> Gap | None:
    """Returns the gap of `end_difference`, with the interval of the last look of the sequential
    test."""
    values = _differences(runs, name, end_difference)
    look = max((seeds for seeds in LOOKS if seeds <= len(values)), default=0)
    if look and math.inf not in values:
        # Pairs after the look count at the next one.
        values = values[:look]
    return _gap(values, LOOKS.get(look))


def _differences(
    runs: Sequence[Run], name: str, difference: Callable[[Run, Run], float]
) -> list[float]:
    """Returns the difference for each seed whose reference is finite, in the order of the seeds;
    inf for a run that diverged."""
    references = {
        r.seed: r for r in runs if r.name == REFERENCE and math.isfinite(r.held_out)
    }
    pairs = {r.seed: r for r in runs if r.name == name and r.seed in references}
    values = []
    for seed, run in sorted(pairs.items()):
        value = math.inf
        if math.isfinite(run.held_out):
            value = difference(run, references[seed])
        values.append(value)
    return values


def _gap(values: Sequence[float], error: float | None) -> Gap | None:
    """The mean and its interval. error: one-sided error probability; None gives an infinite
    interval."""
    if not values:
        return None
    count = len(values)
    if math.inf in values:
        return Gap(math.inf, math.inf, math.inf, count)
    mean = statistics.fmean(values)
    half = math.inf
    if error is not None:
        half = half_width(values, error)
    return Gap(mean, mean - half, mean + half, count)


def end_difference(run: Run, reference: Run) -> float:
    """The mean difference of the training losses of the last steps, batch by batch. Each is
    computed before the step on its batch."""
    count = max(round(TAIL * len(reference.losses)), 1)
    pairs = zip(run.losses[-count:], reference.losses[-count:], strict=True)
    return statistics.fmean(a - b for a, b in pairs)


def chance_of(runs: Sequence[Run]) -> float:
    """The standard deviation of the reference's held-out loss over seeds; 0 before there are
    `FIRST_LOOK` of them."""
    losses = [
        r.held_out for r in runs if r.name == REFERENCE and math.isfinite(r.held_out)
    ]
    if len(losses) >= FIRST_LOOK:
        return statistics.stdev(losses)
    return 0.0


def outcome(gap: Gap | None, tolerance: float, chance: float = 0.0) -> str:
    """What a gap says, in the words of `Candidate.outcome`. chance: `chance_of` the runs."""
    if gap is None:
        return "not trained"
    if math.isinf(gap.mean):
        return "diverges"
    if gap.low > tolerance:
        return "worse"
    if gap.high < 0:
        return "better"
    if gap.high <= tolerance:
        return "as the reference"
    if gap.high <= chance:
        return "within chance"
    return "not decided"


def compare(
    candidates: Iterable[Candidate], runs: Sequence[Run], tolerance: float
) -> None:
    """Writes gaps, intervals and outcomes of ``runs`` into the candidates."""
    chance = chance_of(runs)
    for candidate in candidates:
        measured = sequential_gap(runs, candidate.name)
        candidate.outcome = outcome(measured, tolerance, chance)
        if measured is not None:
            mean, low, high = (x if math.isfinite(x) else None for x in measured[:3])
            candidate.gap = mean
            candidate.low = low
            candidate.high = high
            candidate.seeds = measured.seeds


# What an expected time is multiplied by: runs of the same length differ where other programs run
# too.
MARGIN = 1.3


class Budget:
    """seconds: for everything, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; may be negative."""
        return self._end - time.perf_counter()

    def allows(self, seconds: float) -> bool:
        """Whether something that is expected to take ``seconds`` ends in time."""
        return MARGIN * seconds < self.left

    def part(self, share: float) -> Budget:
        """A share of the whole, from now on, but no more than what is left."""
        return Budget(min(share * self.seconds, self.left))


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
    """Trains until every candidate is decided, has all seeds, or has no time left, and adds to
    ``runs``: for each the pairs of the first look, then the next pair of the candidate nearest to a
    good verdict, by the upper end of its interval. has_time: asked with the names of the runs of a
    pair that are missing."""
    trained = {(run.name, run.seed) for run in runs}

    def missing(name: str) -> list[tuple[str, int]]:
        for seed in range(min(max_seeds, max(LOOKS))):
            if (name, seed) not in trained:
                pair = [(REFERENCE, seed), (name, seed)]
                return [run for run in pair if run not in trained]
        return []

    def upper_end(name: str) -> float:
        measured = sequential_gap(runs, name)
        if measured and measured.seeds >= FIRST_LOOK:
            return measured.high
        return -math.inf  # each gets the pairs of its first look before others go on

    def can_go_on(name: str) -> bool:
        needed = [each for each, _ in missing(name)]
        now = outcome(sequential_gap(runs, name), tolerance)
        is_open = now in ("not trained", "not decided")
        return is_open and bool(needed) and has_time(needed)

    while candidates := list(filter(can_go_on, names)):
        for name, seed in missing(min(candidates, key=upper_end)):
            try:
                runs.append(train(name, seed))
            except OutOfTime:
                return
            trained.add((name, seed))
            on_run()
