"""Which layers to keep in high precision, and which candidates are trained and recommended.

Squared update errors add, so that the choice of layers is a knapsack. The largest error per FLOP
first is the optimal order of the fractional one (Dantzig 1957, "Discrete-variable extremum
problems"); its points are the frontier of FLOPs cast against error.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...recipes.policy import LayerRule, Policy
from ...recipes.recipe import PRODUCTS, Recipe
from ..trace import Product
from .findings import Candidate, Findings

# The update error up to which a policy is expected to train as the reference, by the GPT of
# docs/preflight.md. It selects the finalists; training runs decide.
FINE = 0.25

AS_GOOD = ("as the reference", "better", "within chance")
FAILED = ("worse", "diverges")


def shares(products: Sequence[Product]) -> dict[str, float]:
    """Layer -> its share of the FLOPs of all products. Layers that cannot be cast count in the
    total and are not listed."""
    total = sum(product.flops for product in products)
    share: dict[str, float] = {}
    for product in products:
        if not product.why_not:
            share.setdefault(product.layer, 0.0)
            share[product.layer] += product.flops / total
    return share


def keeping(recipe: Recipe | str, kept: Sequence[str]) -> Policy:
    """The policy that casts all layers but those in ``kept``."""
    return Policy(recipe, rules=tuple(LayerRule(name) for name in kept))


class LayerError(NamedTuple):
    """The squared update error of a layer alone. share: its share of the FLOPs of all products."""

    layer: str
    squared_error: float
    share: float


class Selection(NamedTuple):
    """kept: the layers in high precision. share: the share of the FLOPs that are cast.
    squared_error: the sum over the layers that are cast."""

    kept: list[str]
    share: float
    squared_error: float


def frontier(errors: Sequence[LayerError]) -> list[Selection]:
    """All prefixes of the order by squared error per FLOP: from all layers cast to none."""
    order = sorted(errors, key=lambda e: -e.squared_error / max(e.share, 1e-12))
    selections = []
    for count in range(len(order) + 1):
        kept = order[:count]
        cast = order[count:]
        names = [e.layer for e in kept]
        share = sum(e.share for e in cast)
        error = sum(e.squared_error for e in cast)
        selections.append(Selection(names, share, error))
    return selections


def knee(selections: Sequence[Selection]) -> Selection:
    """The point farthest from the line between the ends of a frontier of FLOPs against squared
    error, both from 0 to 1."""
    # Satopaa et al. 2011, "Finding a kneedle in a haystack".
    first = selections[0]
    height = first.squared_error or 1.0
    width = first.share or 1.0
    return max(selections, key=lambda s: s.share / width - s.squared_error / height)


def choose(
    recipe: Recipe,
    errors: Sequence[LayerError],
    probes: Sequence[Callable[[Policy], float]],
) -> Selection:
    """The first point of the frontier whose error is fine at all snapshots or, if none is, the
    knee."""
    # Errors fall along the frontier. They are measured, as sums are too low for recipes that lose
    # values, as those without scales.
    selections = frontier(errors)
    inner = selections[1:-1]

    def is_fine(selection: Selection) -> bool:
        policy = keeping(recipe, selection.kept)
        return max(probe(policy) for probe in probes) <= FINE

    first = bisect_left(inner, True, key=is_fine)
    if first < len(inner):
        return inner[first]
    return knee(selections)


def name_of(recipe: str, kept: Sequence[str]) -> str:
    """The name of a policy that keeps some layers: "mxfp4 except lm_head"."""
    if not kept:
        return recipe
    if len(kept) > 2:
        return f"{recipe} except {kept[0]} and {len(kept) - 1} more"
    return f"{recipe} except {' and '.join(kept)}"


def bits_of(recipe: Recipe, share: float) -> float:
    """`Candidate.bits` of a recipe that casts ``share`` of the FLOPs."""
    widths = []
    for name in PRODUCTS:
        pair = getattr(recipe, name)
        width = 16
        if None not in pair:
            width = max(cast.number_format.bits for cast in pair)
        widths.append(width)
    return share * statistics.fmean(widths) + (1 - share) * 16


def worst_error(candidate: Candidate) -> float:
    """The largest update error over the snapshots; inf if none was measured."""
    return max(candidate.errors.values(), default=math.inf)


def runs_on(findings: Findings, hardware: str) -> set[str]:
    """The names of the candidates that an accelerator has units for."""
    rows = (row for row in findings.forecasts if row.hardware == hardware)
    variants = (variant for row in rows for variant in row.variants)
    return {variant.recipe for variant in variants if not variant.simulated}


def _by_device(
    candidates: Sequence[Candidate], findings: Findings
) -> dict[str, list[Candidate]]:
    """Device -> the candidates that it has units for. Without forecasts: one device for all."""
    if not findings.forecasts:
        return {"": list(candidates)}
    by_device = {}
    for device in dict.fromkeys(row.hardware for row in findings.forecasts):
        names = runs_on(findings, device)
        by_device[device] = [c for c in candidates if c.name in names]
    return by_device


def finalists(findings: Findings) -> dict[str, Candidate]:
    """Device -> the policy to train: the fine one with the fewest bits, or else the one with the
    smallest error; among policies with equal bits, the one of an earlier device. Candidates that
    save nothing (16 bits), and those that were trained and failed, are left out."""
    chosen: dict[str, Candidate] = {}
    for device, runs in _by_device(findings.candidates, findings).items():
        usable = [c for c in runs if c.bits < 15.5 and c.outcome not in FAILED]
        finite = [c for c in usable if math.isfinite(worst_error(c))]
        fine = [c for c in usable if worst_error(c) <= FINE]
        order = sorted(fine, key=_cost) or sorted(finite, key=worst_error)
        if order:
            best = order[0]
            same = [c for c in order if _cost(c)[0] == _cost(best)[0]]
            # One run then serves several devices.
            chosen[device] = next((c for c in same if c in chosen.values()), best)
    return chosen


def recommended(findings: Findings) -> dict[str, Candidate]:
    """Device -> the candidate with the fewest bits that trains as the reference; without one, that
    within chance whose gap has the lowest upper end. Transforms, without a policy, are left
    out."""
    good = [c for c in findings.candidates if c.outcome in AS_GOOD and c.policy]
    devices = _by_device(good, findings)
    return {device: min(runs, key=_rank) for device, runs in devices.items() if runs}


def _rank(candidate: Candidate) -> tuple[bool, float, float, float]:
    is_chance = candidate.outcome == "within chance"
    high = 0.0
    if is_chance:
        high = candidate.high or 0.0
    return is_chance, high, *_cost(candidate)


def _cost(candidate: Candidate) -> tuple[float, float]:
    return round(candidate.bits, 1), worst_error(candidate)
