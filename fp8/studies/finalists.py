"""Which candidates a preflight trains, and which it recommends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .findings import Candidate, Estimate

__all__ = ["FINE", "finalists", "recommended", "worst_error"]

FINE = 0.25
"""The update error up to which a policy is expected to train as the reference. On a GPT of two
layers the recipes with errors up to 0.14 ended within 0.005 nats of it after 600 steps, and one
with 0.37 ended 0.067 above (docs/preflight.md). It selects the finalists; training runs decide."""

AS_GOOD = ("as the reference", "better")
FAILED = ("worse", "diverges")


def worst_error(candidate: Candidate) -> float:
    """The largest update error over the snapshots; inf if none was measured."""
    return max(candidate.errors.values(), default=math.inf)


def _runs_on(device: str, estimates: Sequence[Estimate]) -> set[str]:
    """The names of the candidates that the device has units for."""
    return {row.candidate for row in estimates if row.hardware == device and not row.why_not}


def finalists(candidates: Sequence[Candidate], estimates: Sequence[Estimate]) -> list[Candidate]:
    """The policies to train: for each device the fine one with the fewest bits, or else the one
    with the smallest error.

    Of several with equal bits it is that of an earlier device if it runs here too, or the one with
    the smallest error. Candidates that save nothing (16 bits), and those that were trained and
    failed, are left out.
    """
    found: dict[str, Candidate] = {}
    for device in dict.fromkeys(row.hardware for row in estimates):
        names = _runs_on(device, estimates)
        usable = [c for c in candidates if c.name in names and c.bits < 15.5]
        usable = [c for c in usable if c.outcome not in FAILED]
        fine = [c for c in usable if worst_error(c) <= FINE]
        order = sorted(fine, key=_cost) or sorted(filter(_finite, usable), key=worst_error)
        for best in order[:1]:
            equal = [c for c in order if c.name in found and _cost(c)[0] == _cost(best)[0]]
            found |= {c.name: c for c in equal or [best]}
    return list(found.values())


def _finite(candidate: Candidate) -> bool:
    return math.isfinite(worst_error(candidate))


def recommended(
    candidates: Sequence[Candidate], estimates: Sequence[Estimate]
) -> dict[str, Candidate]:
    """Device -> the candidate that trains as the reference and has the fewest bits there.

    Without a device for which there is one. Transforms have no policy and are not recommended.
    """
    good = [c for c in candidates if c.outcome in AS_GOOD and c.policy]
    found = {}
    for device in dict.fromkeys(row.hardware for row in estimates):
        names = _runs_on(device, estimates)
        best = min((c for c in good if c.name in names), key=_cost, default=None)
        if best is not None:
            found[device] = best
    return found


def _cost(candidate: Candidate) -> tuple[float, float]:
    return round(candidate.bits, 1), worst_error(candidate)
