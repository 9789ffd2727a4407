"""Which candidates are trained, and which are recommended, on each accelerator."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .findings import Candidate, Findings

FINE = 0.25
"""The update error up to which a policy is expected to train as the reference. On a GPT of two
layers the recipes with errors up to 0.14 ended within 0.005 nats of it after 600 steps, and one
with 0.37 ended 0.067 above (docs/preflight.md). It selects the finalists; training runs decide."""

AS_GOOD = ("as the reference", "better", "within chance")
FAILED = ("worse", "diverges")


def worst_error(candidate: Candidate) -> float:
    """The largest update error over the snapshots; inf if none was measured."""
    return max(candidate.errors.values(), default=math.inf)


def runs_on(findings: Findings, hardware: str) -> set[str]:
    """The names of the candidates that an accelerator has units for."""
    rows = (row for row in findings.forecasts if row.hardware == hardware)
    return {variant.recipe for row in rows for variant in row.variants if not variant.simulated}


def _by_device(candidates: Sequence[Candidate], findings: Findings) -> dict[str, list[Candidate]]:
    """Device -> the candidates that it has units for. Without forecasts: one device for all."""
    names = {row.hardware: runs_on(findings, row.hardware) for row in findings.forecasts}
    if not names:
        return {"": list(candidates)}
    return {device: [c for c in candidates if c.name in runs] for device, runs in names.items()}


def finalists(findings: Findings) -> dict[str, Candidate]:
    """Device -> the policy to train: the fine one with the fewest bits, or else the one with the
    smallest error. Of several with equal bits it is that of an earlier device, if it runs here too.
    Candidates that save nothing (16 bits), and those that were trained and failed, are left out."""
    chosen: dict[str, Candidate] = {}
    for device, runs in _by_device(findings.candidates, findings).items():
        usable = [c for c in runs if c.bits < 15.5 and c.outcome not in FAILED]
        finite = [c for c in usable if math.isfinite(worst_error(c))]
        fine = [c for c in usable if worst_error(c) <= FINE]
        order = sorted(fine, key=_cost) or sorted(finite, key=worst_error)
        for best in order[:1]:
            earlier = {c.name for c in chosen.values()}
            equal = [c for c in order if c.name in earlier and _cost(c)[0] == _cost(best)[0]]
            chosen[device] = (equal or [best])[0]
    return chosen


def recommended(findings: Findings) -> dict[str, Candidate]:
    """Device -> the candidate with the fewest bits that trains as the reference; without one, that
    within chance whose gap has the lowest upper end. Transforms have no policy and are not
    recommended."""
    good = [c for c in findings.candidates if c.outcome in AS_GOOD and c.policy]
    devices = _by_device(good, findings)
    return {device: min(runs, key=_rank) for device, runs in devices.items() if runs}


def _rank(candidate: Candidate) -> tuple[bool, float, float, float]:
    is_chance = candidate.outcome == "within chance"
    return is_chance, (candidate.high or 0.0) if is_chance else 0.0, *_cost(candidate)


def _cost(candidate: Candidate) -> tuple[float, float]:
    return round(candidate.bits, 1), worst_error(candidate)
