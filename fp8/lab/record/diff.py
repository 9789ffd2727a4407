"""``fp8 record diff``: the first step at which two records part, and where."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...casts.counts import OPERANDS
from ...casts.watch import Seen
from .runs import Run, lost

OCTAVES = 1.0
DECIBELS = 1.0
OF_RMS = 0.1
"""How far the scale, the SQNR and the RMS of a cast may differ: what one step of a scale, or the
noise of another order of sums, makes of them. The RMS is relative."""

SHOWN = 12
"""The places that are listed."""


class Place(NamedTuple):
    """A cast of a step."""

    step: int
    layer: str
    operand: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two records part.

    Attributes:
        step: the first step at which anything parts; None if nothing does.
        lines: what parts there, in the order of execution, and by how much: the casts of the
            forward pass, the loss, and the casts of the backward pass, which begins with the last
            layer.
        only: what only one of them has.
        same_casts: whether both have the same layers and operands.
    """

    step: int | None
    lines: list[str]
    only: list[str]
    same_casts: bool

    @property
    def parts(self) -> bool:
        """Whether they part: somewhere, or in what is cast."""
        return self.step is not None or not self.same_casts

    def __str__(self) -> str:
        head = "The records agree at every step that both have."
        if self.step is not None:
            head = f"The records part at step {self.step}:"
        shown = [f"  {line}" for line in self.lines[:SHOWN]]
        if len(self.lines) > SHOWN:
            shown.append(f"  and {len(self.lines) - SHOWN} more")
        return "\n".join([head, *shown, *self.only])


def diff(a: Run, b: Run, tolerance: float = 0.01) -> Difference:
    """Compares two records, cast by cast.

    Args:
        a, b: as read.
        tolerance: how far lost shares may differ, absolutely, and losses, relatively; from 0.

    Raises:
        ValueError: if no cast of a step is in both, or the tolerance is below 0 or NaN.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}: expected a number from 0")
    left = _by_place(a)
    right = _by_place(b)
    # Records may have other steps: they are compared where both have looked.
    both = [place for place in left if place in right]
    if not both:
        raise ValueError("no step, layer and operand is in both records")
    found: dict[int, list[tuple[Order, str]]] = {}
    layers = list(dict.fromkeys(place.layer for place in left))
    for place in both:
        by = _row_difference(left[place], right[place], tolerance)
        if by:
            line = f"{place.layer} {place.operand}: {', '.join(by)}"
            order = _order(layers.index(place.layer), place.operand)
            found.setdefault(place.step, []).append((order, line))
    losses = dict(b.losses)
    for step, loss in a.losses:
        other = losses.get(step, loss)
        if _apart(loss, other, _relative) > tolerance:
            line = f"loss {loss:.6g} and {other:.6g}"
            found.setdefault(step, []).append((BETWEEN, line))
    # What differs later follows from the first step.
    parts_at = min(found, default=None)
    lines: list[str] = []
    if parts_at is not None:
        lines = [line for _, line in sorted(found[parts_at])]
    return Difference(
        step=parts_at,
        lines=lines,
        only=[*_only("first", left, right), *_only("second", right, left)],
        same_casts=_casts(left).keys() == _casts(right).keys(),
    )


class Order(NamedTuple):
    """When a cast runs in a step. layer: its place, from the end in the backward pass."""

    backward: float
    layer: int = 0
    operand: int = 0


BETWEEN = Order(0.5)
"""The loss."""


def _order(layer: int, operand: str) -> Order:
    number = OPERANDS.index(operand)
    if operand in ("input", "weight"):
        return Order(0, layer, number)
    return Order(1, -layer, number)


def _by_place(run: Run) -> dict[Place, Seen]:
    return {Place(row.step, row.layer, row.operand): row for row in run.rows}


def _row_difference(a: Seen, b: Seen, tolerance: float) -> list[str]:
    by = []
    if _apart(a.scale, b.scale, _octaves) > OCTAVES:
        by.append(f"scale {a.scale:.3g} and {b.scale:.3g}")
    if abs(lost(a) - lost(b)) > tolerance:
        by.append(f"lost {lost(a):.2%} and {lost(b):.2%}")
    if _apart(a.sqnr, b.sqnr, lambda x, y: abs(x - y)) > DECIBELS:
        by.append(f"SQNR {a.sqnr:.1f} and {b.sqnr:.1f} dB")
    if _apart(a.rms, b.rms, _relative) > OF_RMS:
        by.append(f"RMS {a.rms:.3g} and {b.rms:.3g}")
    return by


def _apart(a: float, b: float, distance: Callable[[float, float], float]) -> float:
    """The distance of two numbers; 0 of two NaN, Inf of a number and Inf or NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return distance(a, b)


def _octaves(a: float, b: float) -> float:
    if min(a, b) <= 0:
        return math.inf
    return abs(math.log2(a / b))


def _relative(a: float, b: float) -> float:
    # Not of two zeros, which `_apart` finds equal.
    return abs(a - b) / max(abs(a), abs(b))


def _casts(places: Iterable[Place]) -> dict[str, None]:
    """The casts, in words and in order."""
    return dict.fromkeys(f"{place.layer} {place.operand}" for place in places)


def _only(name: str, these: dict[Place, Seen], those: dict[Place, Seen]) -> list[str]:
    """What only these have: casts, and steps."""
    there = _casts(those)
    missing = [cast for cast in _casts(these) if cast not in there]
    seen = {place.step for place in those}
    steps = sorted({place.step for place in these} - seen)
    lines = []
    if missing:
        lines.append(f"Only in the {name}: {', '.join(missing)}")
    if steps:
        span = f"{len(steps)} looks, at steps {steps[0]} to {steps[-1]}"
        lines.append(f"Only in the {name}: {span}")
    return lines
