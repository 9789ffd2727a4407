"""Is the policy that `fp8.preflight` recommends the best one?

``python -m benchmarks.preflight [NAME ...]`` runs a preflight of each of twenty small models
(`benchmarks.problems`), then trains every candidate with three seeds that the preflight did not
use, and compares. Run again, it continues with what is missing in --out. Names are measured anew,
and of the comparison that --out has of them only a recommended candidate that it lacks is trained.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import Row, report
from benchmarks.problems import PROBLEMS
from fp8.lab.preflight.findings import Candidate, Findings, Run
from fp8.lab.preflight.paired_runs import REFERENCE, Gap, gap
from fp8.lab.preflight.preflight import RECIPES_TRIED, PreflightError, preflight
from fp8.lab.preflight.search import (
    finalists,
    keeping,
    recommended,
    shares,
    worst_error,
)
from fp8.lab.preflight.training import Problem, train, under
from fp8.lab.preflight.update_error import Probe
from fp8.lab.trace import quiet
from fp8.recipes.policy import Policy

STEPS, HELD_OUT = 60, 8
SEEDS = (100, 101, 102)
"""Of the exhaustive comparison. A preflight counts from 0."""
BUDGET, MOST_SEEDS = 80.0, 32
TARGET = 0.01
COARSE = ("mxfp4", "nvfp4")
"""Recipes whose kept layers are compared: the first that was searched."""

OUT = Path("out/benchmark-preflight.jsonl")


@dataclass
class Result:
    """What was measured of a model.

    errors: candidate -> worst update error of the preflight. gaps: candidate -> held-out loss minus
    the reference's, mean and interval. differs: pairs of recipes whose gaps differ by more than the
    interval of their difference. recommended: device -> candidate; first_to_try: the same where
    none is. excess: of their held-out loss over that of the best one, mean and interval, for the
    device where it is largest.
    kept: selection ("search", "first", "last") -> share of the FLOPs kept, update error, gap.
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
    coarse: str = ""
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    chance: float = 0.0
    statistic: str = "held-out losses"


# Measuring


def measure(
    name: str, source: Callable[..., Any], *, steps: int, recorded: Result | None = None
) -> Result:
    """A preflight of a model, and the exhaustive comparison, which may be recorded."""
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
    if recorded is not None and recorded.gaps:
        _reuse(result, recorded, found, Problem(source, steps, HELD_OUT))
        result.seconds = time.perf_counter() - begun
        return result
    _compare_all(result, found, Problem(source, steps, HELD_OUT))
    result.seconds = time.perf_counter() - begun
    return result


def _compare_all(result: Result, found: Findings, problem: Problem) -> None:
    """Trains every candidate and every selection of layers."""
    chosen = _selections(found)
    policies = {c.name: Policy.from_dict(c.policy) for c in found.candidates}
    policies |= {
        name: keeping(choice.recipe, choice.kept) for name, choice in chosen.items()
    }
    runs, probes = exhaustive(problem, policies)
    _compare(result, found.candidates, runs)
    cast = sum(shares(found.products).values())
    for selection, choice in chosen.items():
        result.coarse = choice.recipe
        errors = [probe(keeping(choice.recipe, choice.kept)) for probe in probes]
        result.kept[selection] = {
            "layers": choice.kept,
            "share": cast - choice.share,
            "error": math.sqrt(statistics.fmean(error**2 for error in errors)),
            "gap": list(_gap(runs, selection)[:3]),
        }


def _reuse(result: Result, recorded: Result, found: Findings, problem: Problem) -> None:
    """Copies the recorded comparison, and trains what is recommended and not in it."""
    for each in ("gaps", "differs", "coarse", "kept"):
        setattr(result, each, getattr(recorded, each))
    named = result.recommended or result.first_to_try
    policies = {c.name: Policy.from_dict(c.policy) for c in found.candidates}
    missing = {
        name: policies[name] for name in named.values() if name not in result.gaps
    }
    if missing:
        runs, _ = exhaustive(problem, missing)
        result.gaps = result.gaps | {
            name: list(_gap(runs, name)[:3]) for name in missing
        }
    result.errors = recorded.errors | result.errors
    result.best = min(result.gaps, key=lambda name: result.gaps[name][0])
    far = [
        _widest(result.gaps[name], result.gaps[result.best]) for name in named.values()
    ]
    same = named == (recorded.recommended or recorded.first_to_try) and not missing
    result.excess = recorded.excess if same else max(far, default=[])


def _widest(gap: Sequence[float], best: Sequence[float]) -> list[float]:
    """The difference of two gaps, with the widest interval that it can have: of the sum of both
    deviations."""
    if gap == best:
        return [0.0, 0.0, 0.0]
    mean, half = gap[0] - best[0], (gap[2] - gap[1] + best[2] - best[1]) / 2
    return [mean, mean - half, mean + half]


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


def exhaustive(
    problem: Problem, policies: Mapping[str, Policy]
) -> tuple[list[Run], list[Probe]]:
    """All policies and the reference, trained with each seed, and a probe in the middle of each
    reference run."""
    runs, probes = [], []
    for seed in SEEDS:
        middle = (max(problem.steps // 2, 1),)
        run, snapshots = train(problem, REFERENCE, seed, snapshots=middle)
        runs.append(run)
        probes += map(Probe, snapshots)
        for name, policy in policies.items():
            with quiet():
                runs.append(train(problem, name, seed, under(policy))[0])
    return runs, probes


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
    """Held-out loss of ``name`` minus that of ``other``, paired by seed."""
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


# The layers that are kept


class Selection(NamedTuple):
    """Layers to keep under a recipe. share: of the FLOPs, that are cast."""

    recipe: str
    kept: list[str]
    share: float


def _selections(found: Findings) -> dict[str, Selection]:
    """The layers that the search keeps under a coarse recipe, and the first and the last ones with
    at least as many FLOPs. Empty if it keeps none."""
    searched = {c.recipe: c for c in found.candidates if c.kept}
    recipe = next((recipe for recipe in COARSE if recipe in searched), None)
    if recipe is None:
        return {}
    chosen, share = searched[recipe], shares(found.products)
    at_least = sum(share.values()) - chosen.share
    order = list(share)
    return {
        "search": Selection(recipe, chosen.kept, chosen.share),
        "first": _ends(recipe, order, share, at_least),
        "last": _ends(recipe, order[::-1], share, at_least),
    }


def _ends(
    recipe: str, order: Sequence[str], share: Mapping[str, float], at_least: float
) -> Selection:
    """The first layers of an order that have together ``at_least`` a share of the FLOPs."""
    kept: list[str] = []
    for layer in order:
        if sum(share[name] for name in kept) >= at_least - 1e-9:
            break
        kept.append(layer)
    cast = sum(part for layer, part in share.items() if layer not in kept)
    return Selection(recipe, kept, cast)


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
    """Of the recipes' update errors and gaps: of all pairs; of those whose gaps differ by more than
    the interval of their difference; and of these the ones that differ by more than TARGET."""

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


def standing(result: Result, figure: str) -> str:
    """Whether the search's error or gap is "lower" than those of the first and of the last layers,
    or "not lower"; "not compared" if these are the layers that it keeps, or if nothing is cast
    beside them."""
    kept = result.kept
    chosen = kept["search"]
    others = [
        each
        for name, each in kept.items()
        if name != "search"
        and each["error"]
        and set(each["layers"]) != set(chosen["layers"])
    ]
    if not others:
        return "not compared"
    best = min(_mean(each[figure]) for each in others)
    return "lower" if _mean(chosen[figure]) < best else "not lower"


def _mean(value: float | list[float]) -> float:
    return value[0] if isinstance(value, list) else value


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
        "kept_of": result.coarse,
        "kept_FLOPs": _three(result, "share", "{:.0%}"),
        "kept_error": _three(result, "error", "{:.3f}"),
        "kept_gap": _three(result, "gap", "{:+.3f}"),
    }


def _by_device(names: Mapping[str, str]) -> str:
    return "; ".join(f"{device}: {name}" for device, name in names.items())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _interval(found: Sequence[float]) -> str:
    return f"{found[0]:+.4f} ({found[1]:+.4f} to {found[2]:+.4f})" if found else ""


def _three(result: Result, figure: str, form: str) -> str:
    """The search's figure, and those of the first and the last layers."""
    return " / ".join(
        form.format(_mean(found[figure])) for found in result.kept.values()
    )


def summary(results: Sequence[Result]) -> Row:
    """The row of all models. Its taus are the median over models of all pairs, and those of the
    pairs that differ, of all models together."""
    done = [result for result in results if not result.failed]
    each = [orders(result) for result in done]
    _, differing, apart = (
        Order(*map(sum, zip(*found, strict=True))) for found in zip(*each, strict=True)
    )
    taus = [found.every.tau for found in each if found.every.tau is not None]
    searched = [result for result in done if result.kept]
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
        "kept_error": _wins(searched, "error"),
        "kept_gap": _wins(searched, "gap"),
    }


def _count(results: Sequence[Result], decided: bool) -> str:
    """How many of the models with or without a recommendation are within: "4 of 5"."""
    found = [
        is_within(result) for result in results if bool(result.recommended) == decided
    ]
    return f"{sum(found)} of {len(found)}"


def _median(values: Sequence[float], form: str) -> str:
    return f"median {form.format(statistics.median(values))}" if values else "none"


def _wins(searched: Sequence[Result], figure: str) -> str:
    counts = Counter(standing(result, figure) for result in searched)
    return f"lower in {counts['lower']} of {counts['lower'] + counts['not lower']}"


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
of those that also are more than {TARGET} apart.
kept: under a recipe of 4 bits, the layers that the search keeps in high precision / the first / the
last layers with at least as many FLOPs: their share of the FLOPs, the update error at other
weights, batches and seeds, and the held-out gap"""


class Measured:
    """What was measured so far, in a file of one JSON object a line; the last of a name counts."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        found = [Result(**json.loads(line)) for line in lines]
        self.results = {result.name: result for result in found}

    def add(self, result: Result) -> None:
        """Stores a result."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        self.results[result.name] = result

    def rows(self) -> list[Row]:
        """Of all models, in the order of PROBLEMS, and their summary."""
        results = [self.results[name] for name in PROBLEMS if name in self.results]
        rows = [row(result) for result in results]
        return rows + ([summary(results)] if any(not r.failed for r in results) else [])


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
    measured = Measured(given.out)
    names = given.names or [name for name in PROBLEMS if name not in measured.results]
    for name in names:
        before = measured.results.get(name)
        measured.add(measure(name, PROBLEMS[name], steps=STEPS, recorded=before))
        print(row(measured.results[name]), flush=True)
    rows = [
        {k: v for k, v in found.items() if v is not None} for found in measured.rows()
    ]
    report("preflight", " ".join(QUESTION.split()), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
