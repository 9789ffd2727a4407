"""Paired comparisons of training runs: which candidates train, their gaps of held-out losses with
intervals, and which are recommended.

A candidate and the reference train from the same weights on the same batches; the gap is the
difference of their held-out losses. Its interval is Student's t over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..hardware import Estimate
from .findings import Candidate, Run

REFERENCE = "reference"
"""The name of the runs in the model's own precision."""

#: The 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom (any table of it).
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


class Gap(NamedTuple):
    """Held-out loss minus the reference's: mean, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int


def gap(runs: Sequence[Run], name: str) -> Gap | None:
    """Over the seeds that a candidate shares with the reference, without those with which the
    reference diverged; None if there are none. Infinite if a run of the candidate diverged."""
    theirs = {run.seed: run.held_out for run in runs if run.name == REFERENCE}
    pairs = [(run.held_out, theirs.get(run.seed, math.nan)) for run in runs if run.name == name]
    differences = [ours - reference for ours, reference in pairs if math.isfinite(reference)]
    if not differences:
        return None
    n = len(differences)
    if not all(map(math.isfinite, differences)):
        return Gap(math.inf, math.inf, math.inf, n)
    mean = statistics.fmean(differences)
    half = half_width(differences) if n > 1 else math.inf
    return Gap(mean, mean - half, mean + half, n)


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of two or more values."""
    return student(len(values)) * statistics.stdev(values) / math.sqrt(len(values))


def student(seeds: int) -> float:
    """The 97.5 % quantile of Student's t for the mean of this many values; above 13, that of 13,
    which is at most 11 % too large."""
    return _T[min(seeds - 2, len(_T) - 1)]


def outcome(found: Gap | None, tolerance: float) -> str:
    """What a gap says, in the words of `Candidate.outcome`. It is none if its interval ends below
    the tolerance; or if its mean is below, and the interval's half-width is within it."""
    if found is None:
        return "not trained"
    if math.isinf(found.mean):
        return "diverges"
    if found.low > tolerance:
        return "worse"
    if found.high < 0:
        return "better"
    narrow = found.mean <= tolerance and found.high - found.low <= 2 * tolerance
    return "as the reference" if found.high <= tolerance or narrow else "not decided"


def is_decided(found: Gap | None, tolerance: float) -> bool:
    """Whether more seeds are not needed: the outcome is known."""
    return outcome(found, tolerance) not in ("not trained", "not decided")


def seeds_needed(low: float, high: float, seeds: int, tolerance: float) -> int:
    """About how many seeds give an interval with a half-width of ``tolerance``, by the spread of
    those that gave the interval from ``low`` to ``high``."""
    deviation = (high - low) / 2 * math.sqrt(seeds) / student(seeds)
    return math.ceil((_T[-1] * deviation / tolerance) ** 2)


def compare(candidates: Iterable[Candidate], runs: Sequence[Run], tolerance: float) -> None:
    """Writes gaps, intervals and outcomes of ``runs`` into the candidates."""
    for candidate in candidates:
        found = gap(runs, candidate.name)
        candidate.outcome = outcome(found, tolerance)
        if found is not None:
            candidate.seeds = found.seeds
            finite = [value if math.isfinite(value) else None for value in found[:3]]
            candidate.gap, candidate.low, candidate.high = finite


def prove(
    names: Sequence[str],
    runs: list[Run],
    run: Callable[[str, int], Run],
    *,
    tolerance: float,
    seeds: Iterable[int],
    has_time: Callable[[str], bool],
) -> None:
    """Trains seed by seed until every candidate is decided, seeds run out, or time does.

    runs: what has been trained so far; extended in place. run: trains a candidate, or REFERENCE,
    with a seed. has_time: asked before each run with its name.
    """
    done = {(r.name, r.seed) for r in runs}
    for seed in seeds:
        left = [name for name in names if not is_decided(gap(runs, name), tolerance)]
        if not left:
            return
        for name in (REFERENCE, *left):
            if (name, seed) in done:
                continue
            if not has_time(name):
                return
            runs.append(run(name, seed))


# Finalists and recommendations


FINE = 0.25
"""The update error up to which a policy is expected to train as the reference. On a GPT of two
layers the recipes with errors up to 0.14 ended within 0.005 nats of it after 600 steps, and one
with 0.37 ended 0.067 above (docs/preflight.md). It selects the finalists; training runs decide."""

AS_GOOD = ("as the reference", "better")
FAILED = ("worse", "diverges")


def worst_error(candidate: Candidate) -> float:
    """The largest update error over the snapshots; inf if none was measured."""
    return max(candidate.errors.values(), default=math.inf)


def _devices(
    candidates: Sequence[Candidate], estimates: Sequence[Estimate]
) -> dict[str, list[Candidate]]:
    """Device -> the candidates that it has units for. Without estimates: one device for all."""
    if not estimates:
        return {"": list(candidates)}
    runs = {(row.hardware, row.candidate) for row in estimates if not row.why_not}
    devices = dict.fromkeys(row.hardware for row in estimates)
    return {device: [c for c in candidates if (device, c.name) in runs] for device in devices}


def finalists(
    candidates: Sequence[Candidate], estimates: Sequence[Estimate]
) -> dict[str, Candidate]:
    """Device -> the policy to train: the fine one with the fewest bits, or else the one with the
    smallest error. Of several with equal bits it is that of an earlier device, if it runs here too.
    Candidates that save nothing (16 bits), and those that were trained and failed, are left out."""
    found: dict[str, Candidate] = {}
    for device, runs in _devices(candidates, estimates).items():
        usable = [c for c in runs if c.bits < 15.5 and c.outcome not in FAILED]
        finite = [c for c in usable if math.isfinite(worst_error(c))]
        fine = [c for c in usable if worst_error(c) <= FINE]
        order = sorted(fine, key=_cost) or sorted(finite, key=worst_error)
        for best in order[:1]:
            earlier = {c.name for c in found.values()}
            equal = [c for c in order if c.name in earlier and _cost(c)[0] == _cost(best)[0]]
            found[device] = (equal or [best])[0]
    return found


def recommended(
    candidates: Sequence[Candidate], estimates: Sequence[Estimate]
) -> dict[str, Candidate]:
    """Device -> the candidate with the fewest bits that trains as the reference, if there is one.
    Transforms have no policy and are not recommended."""
    good = [c for c in candidates if c.outcome in AS_GOOD and c.policy]
    found = _devices(good, estimates)
    return {device: min(runs, key=_cost) for device, runs in found.items() if runs}


def _cost(candidate: Candidate) -> tuple[float, float]:
    return round(candidate.bits, 1), worst_error(candidate)
