"""Is the policy that `fp8.preflight` recommends the best one?

``python -m benchmarks.preflight [NAME ...]`` runs a preflight of each of twenty small models
(`benchmarks.problems`), then trains every candidate with three seeds that the preflight did not
use, and compares. Run again, it continues with what is missing in --out. Names are measured anew.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import Lines, Row, report
from benchmarks.problems import PROBLEMS
from fp8.lab.preflight.findings import Candidate, Findings, Run
from fp8.lab.preflight.paired_runs import REFERENCE, Gap, gap
from fp8.lab.preflight.preflight import RECIPES_TRIED, PreflightError, preflight
from fp8.lab.preflight.search import (
    finalists,
    recommended,
    worst_error,
)
from fp8.lab.preflight.training import Problem, train, under
from fp8.lab.trace import quiet
from fp8.recipes.policy import Policy

STEPS, HELD_OUT = 60, 8
SEEDS = (100, 101, 102)
"""The seeds of the exhaustive comparison. A preflight counts from 0."""
BUDGET, MOST_SEEDS = 80.0, 32
TARGET = 0.01

OUT = Path("out/benchmark-preflight.jsonl")


@dataclass
class Result:
    """What was measured of a model.

    errors: candidate -> worst update error of the preflight. gaps: candidate -> held-out loss minus
    the reference's, mean and interval. differs: pairs of recipes whose gaps differ by more than the
    interval of their difference. recommended: device -> candidate; first_to_try: the same where
    none is. excess: how far their held-out loss is above the best, mean and interval, for the
    device where it is largest.
    outcomes: candidate -> what the preflight's training says. chance: the deviation of the
    reference over seeds.
    statistic: of the verdict: "held-out losses", or "sequential".
    """

    name: str
    seconds: float = 0.0
    step_ms: float = 0.0
    losses: tuple[float, float] = (math.nan, math.nan)
    verdict: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    differs: list[tuple[str, str]] = field(default_factory=list)
    recommended: dict[str, str] = field(default_factory=dict)
    first_to_try: dict[str, str] = field(default_factory=dict)
    best: str = ""
    excess: list[float] = field(default_factory=list)
    failed: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    chance: float = 0.0
    statistic: str = "held-out losses"


# Measuring


def measure(name: str, source: Callable[..., Any], *, steps: int) -> Result:
    """A preflight of a model, and the exhaustive comparison."""
    result, begun = Result(name, statistic="sequential"), time.perf_counter()
    try:
        found = preflight(
            source,
            steps=steps,
            held_out=HELD_OUT,
            budget=BUDGET,
            max_seeds=MOST_SEEDS,
            transforms=False,
            progress=False,
        ).findings
    except PreflightError as error:
        result.failed = str(error)
        return result
    first = found.runs[0]
    result.step_ms = 1000 * first.seconds / steps
    result.losses = first.losses[0], first.held_out
    _conclude(result, found)
    policies = {c.name: Policy.from_dict(c.policy) for c in found.candidates}
    runs = exhaustive(Problem(source, steps, HELD_OUT), policies)
    _compare(result, found.candidates, runs)
    result.seconds = time.perf_counter() - begun
    return result


def _conclude(result: Result, found: Findings) -> None:
    """Writes what the preflight says."""
    result.verdict, result.notes = str(found.verdict).splitlines(), found.notes
    result.errors = {c.name: worst_error(c) for c in found.candidates}
    result.outcomes = {c.name: c.outcome for c in found.candidates if c.seeds}
    result.chance = found.settings["chance"]
    best = recommended(found)
    result.recommended = {device: candidate.name for device, candidate in best.items()}
    if not best:
        untried = finalists(found)
        result.first_to_try = {
            device: candidate.name for device, candidate in untried.items()
        }


def exhaustive(problem: Problem, policies: Mapping[str, Policy]) -> list[Run]:
    """All policies and the reference, trained with each seed."""
    runs = []
    for seed in SEEDS:
        runs.append(train(problem, REFERENCE, seed)[0])
        for name, policy in policies.items():
            with quiet():
                runs.append(train(problem, name, seed, under(policy))[0])
    return runs


def _gap(runs: Iterable[Run], name: str) -> Gap:
    found = gap(runs, name)
    assert found is not None
    return found


def _compare(
    result: Result, candidates: Sequence[Candidate], runs: Sequence[Run]
) -> None:
    """Writes the gaps, what is best and how far the recommended ones are from it."""
    names = [candidate.name for candidate in candidates]
    result.gaps = {name: list(_gap(runs, name)[:3]) for name in names}
    recipes = [candidate.name for candidate in candidates if not candidate.kept]
    result.differs = [pair for pair in combinations(recipes, 2) if _differ(runs, *pair)]
    result.best = min(names, key=lambda name: result.gaps[name][0])
    named = result.recommended or result.first_to_try
    far = [difference(runs, name, result.best) for name in named.values()]
    result.excess = list(max(far)[:3]) if far else []


def difference(runs: Iterable[Run], name: str, other: str) -> Gap:
    """The held-out loss of ``name`` minus the loss of ``other``, paired by seed."""
    if name == other:
        return Gap(0.0, 0.0, 0.0, len(SEEDS))
    renamed = [
        replace(run, name=REFERENCE if run.name == other else name)
        for run in runs
        if run.name in (name, other)
    ]
    return _gap(renamed, name)


def _differ(runs: Sequence[Run], name: str, other: str) -> bool:
    """Whether the held-out losses differ by more than the interval of their difference. One run
    that diverges beside one that does not: they do."""
    bad = [math.isinf(_gap(runs, each).mean) for each in (name, other)]
    if any(bad):
        return not all(bad)
    found = difference(runs, name, other)
    return found.low > 0 or found.high < 0


# Rows


class Order(NamedTuple):
    """Pairs of a list that have the same order in x and y, the opposite one, are tied in x alone,
    and in y alone."""

    same: int = 0
    opposite: int = 0
    x: int = 0
    y: int = 0

    @property
    def pairs(self) -> int:
        """Without those that are tied in both."""
        return sum(self)

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b (Kendall 1945, "The treatment of ties in ranking problems"); None if all
        pairs are tied in x or in y."""
        untied = self.same + self.opposite
        root = math.sqrt((untied + self.x) * (untied + self.y))
        return (self.same - self.opposite) / root if root else None


def order(
    xs: Mapping[str, float], ys: Mapping[str, float], pairs: Iterable[tuple[str, str]]
) -> Order:
    """The order of pairs of names in two quantities."""
    counts = [0, 0, 0, 0]
    for a, b in pairs:
        x, y = (xs[a] > xs[b]) - (xs[a] < xs[b]), (ys[a] > ys[b]) - (ys[a] < ys[b])
        if x or y:
            counts[(0 if x == y else 1) if x and y else (2 if y else 3)] += 1
    return Order(*counts)


class Orders(NamedTuple):
    """How update errors order recipes, against gaps: over all pairs; over pairs whose gaps differ
    by more than the interval of their difference; and over pairs that also differ by more than
    TARGET.
    """

    every: Order
    differing: Order
    apart: Order


def orders(result: Result) -> Orders:
    """The orders of the pairs of recipes of a model."""
    gaps = {name: found[0] for name, found in result.gaps.items()}
    recipes = [recipe for recipe in RECIPES_TRIED if recipe in gaps]
    differing = [(a, b) for a, b in result.differs]
    apart = [(a, b) for a, b in differing if not abs(gaps[a] - gaps[b]) <= TARGET]
    pairs = (combinations(recipes, 2), differing, apart)
    return Orders(*(order(result.errors, gaps, each) for each in pairs))


def is_within(result: Result) -> bool:
    """Whether the loss of the policy that is recommended, or the first to try, is within TARGET of
    the best candidate's, or the interval of their difference contains 0."""
    return bool(result.excess) and (result.excess[0] <= TARGET or result.excess[1] <= 0)


def row(result: Result) -> Row:
    """The row of a model."""
    problem = PROBLEMS.get(result.name)
    shown: Row = {
        "name": result.name,
        "kind": problem.kind if problem else "",
        "library": problem.library if problem else "",
    }
    if result.failed:
        return shown | {"recommended": f"failed: {result.failed}"}
    found = orders(result)
    return {
        **shown,
        "loss": f"{result.losses[0]:.2f} to {result.losses[1]:.2f}",
        "statistic": result.statistic,
        "recommended": _by_device(result.recommended)
        or f"not decided; first to try {_by_device(result.first_to_try)}",
        "best": f"{result.best} ({result.gaps[result.best][0]:+.4f})",
        "excess": _interval(result.excess),
        "within": is_within(result),
        "tau": _rounded(found.every.tau),
        "pairs_that_differ": found.differing.pairs,
        "tau_of_these": _rounded(found.differing.tau),
        "pairs_apart": found.apart.pairs,
        "tau_of_those": _rounded(found.apart.tau),
    }


def _by_device(names: Mapping[str, str]) -> str:
    return "; ".join(f"{device}: {name}" for device, name in names.items())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _interval(found: Sequence[float]) -> str:
    return f"{found[0]:+.4f} ({found[1]:+.4f} to {found[2]:+.4f})" if found else ""


def summary(results: Sequence[Result]) -> Row:
    """The row of all models. Its taus are the median over models of all pairs, and those of the
    pairs that differ, of all models together."""
    done = [result for result in results if not result.failed]
    each = [orders(result) for result in done]
    _, differing, apart = (
        Order(*map(sum, zip(*found, strict=True))) for found in zip(*each, strict=True)
    )
    taus = [found.every.tau for found in each if found.every.tau is not None]
    return {
        "name": "all",
        "kind": f"{len({PROBLEMS[r.name].kind for r in results if r.name in PROBLEMS})} kinds",
        "recommended": f"{sum(bool(r.recommended) for r in done)} of {len(results)}",
        "excess": _median([r.excess[0] for r in done if r.excess], "{:+.4f}"),
        "within": f"{_count(done, True)} recommended, {_count(done, False)} not decided",
        "tau": _median(taus, "{:.2f}"),
        "pairs_that_differ": differing.pairs,
        "tau_of_these": _rounded(differing.tau),
        "pairs_apart": apart.pairs,
        "tau_of_those": _rounded(apart.tau),
    }


def _count(results: Sequence[Result], decided: bool) -> str:
    """How many of the models with or without a recommendation are within: "4 of 5"."""
    found = [
        is_within(result) for result in results if bool(result.recommended) == decided
    ]
    return f"{sum(found)} of {len(found)}"


def _median(values: Sequence[float], form: str) -> str:
    return f"median {form.format(statistics.median(values))}" if values else "none"


# The command line

QUESTION = f"""\
small models with random weights and a task each, {STEPS} steps: `fp8.preflight`, then every
candidate (all recipes and all searched choices) trained with {len(SEEDS)} paired seeds that the
preflight did not use. statistic: of the preflight's verdict; rows of held-out losses are of an
earlier one. excess: held-out loss of the recommended policy (or, where the seeds did
not decide within the budget, of the policy to try first) over that of the best
candidate, with the 95 % interval over seeds, for the device where it is largest; within: at most
{TARGET}, or the interval contains 0. tau: Kendall's tau-b of the recipes' update errors and gaps;
of all pairs; of the pairs whose gaps differ by more than the 95 % interval of their difference; and
of those that also are more than {TARGET} apart"""


def rows(results: Mapping[str, Result]) -> list[Row]:
    """The rows of all models, in the order of PROBLEMS, and their summary."""
    ordered = [results[name] for name in PROBLEMS if name in results]
    found = [row(result) for result in ordered]
    if not all(result.failed for result in ordered):
        found.append(summary(ordered))
    return [{k: v for k, v in each.items() if v is not None} for each in found]


def main() -> int:
    """Measures what is asked for and missing, prints the rows and records them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of PROBLEMS")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--cpu", action="store_true", help="seconds of the processor, beside other load"
    )
    given = parser.parse_args()
    if given.cpu:  # one thread: the clock of the budget, of runs and of this file
        time.perf_counter = time.process_time
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    lines = Lines(given.out)
    results = {line["name"]: Result(**line) for line in lines.rows}  # the last counts
    for name in given.names or [name for name in PROBLEMS if name not in results]:
        results[name] = measure(name, PROBLEMS[name], steps=STEPS)
        lines.add(asdict(results[name]))
        print(row(results[name]), flush=True)
    report("preflight", " ".join(QUESTION.split()), rows(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
