"""The page of ``fp8 record page``: what casts lose, by layers and steps, as one HTML file."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from importlib import resources

from ...casts.watch import Seen
from ...common.libraries import need
from .runs import Loss, Run, lost

COLUMNS = 120
"""Columns of the map. Of more looks, neighbours share one, which shows the worst."""
POINTS = 1000
"""Points of the curve. Of more losses, neighbours share one, which shows the largest."""
BOUNDS = (0.0, 0.001, 0.01, 0.1, 1.0)
"""The largest lost share of each colour."""
WIDTH, HEIGHT = 1000, 160
"""The curve, in units of its drawing."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cast in the map. level: index of its colour. title: its numbers, in words."""

    level: int
    title: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """A cast, and its cells in all columns; None where it was not seen."""

    layer: str
    operand: str
    cells: list[Cell | None]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss. pieces: points of each finite piece. faults: where it is Inf or NaN, along x."""

    pieces: list[str]
    faults: list[float]
    low: float
    high: float
    first: int
    last: int


def page(run: Run, name: str) -> str:
    """The record as one HTML document without references to other files. Equal records give the
    same text. Raises ImportError without jinja2, and ValueError if the record has no look."""
    jinja2 = need("jinja2")
    if not run.rows:
        raise ValueError(f"{name} has no look: the training ended in its first pass")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = (
        resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    steps = sorted({row.step for row in run.rows})
    share = math.ceil(len(steps) / COLUMNS)
    columns = [steps[i : i + share] for i in range(0, len(steps), share)]
    return environment.from_string(text).render(
        name=name,
        header=run.header,
        columns=columns,
        lines=_lines(run.rows, columns),
        curve=_curve(run.losses),
        looks=len(steps),
        worst=sorted(run.rows, key=lost, reverse=True)[0],
        lost=lost,
        bounds=BOUNDS,
        width=WIDTH,
        height=HEIGHT,
    )


def _lines(rows: list[Seen], columns: list[list[int]]) -> list[Line]:
    column_of = {step: i for i, column in enumerate(columns) for step in column}
    worst: dict[tuple[str, str], dict[int, Seen]] = {}
    for row in rows:
        cells = worst.setdefault((row.layer, row.operand), {})
        column = column_of[row.step]
        if column not in cells or lost(row) > lost(cells[column]):
            cells[column] = row
    lines = []
    for (layer, operand), cells in worst.items():
        found = [cells.get(column) for column in range(len(columns))]
        lines.append(Line(layer=layer, operand=operand, cells=[*map(_cell, found)]))
    return lines


def _cell(row: Seen | None) -> Cell | None:
    if row is None:
        return None
    title = (
        f"{row.layer} {row.operand} ({row.format}), step {row.step}: "
        f"{row.zero:.3%} become zero, {row.saturated:.3%} saturate, "
        f"{row.nonfinite:.3%} Inf or NaN; scale {row.scale:.3g}, RMS {row.rms:.3g}, "
        f"largest {row.largest:.3g}, SQNR {row.sqnr:.1f} dB"
    )
    return Cell(level=bisect_left(BOUNDS, lost(row)), title=title)


def _curve(losses: list[Loss]) -> Curve | None:
    """None without a finite loss."""
    finite = [row.loss for row in losses if math.isfinite(row.loss)]
    if not finite:
        return None
    size = math.ceil(len(losses) / POINTS)
    groups = [losses[i : i + size] for i in range(0, len(losses), size)]
    shown = [max(group, key=_height) for group in groups]
    low, high = min(finite), max(finite)
    first, last = losses[0].step, losses[-1].step
    across = WIDTH / max(1, last - first)
    up = (HEIGHT - 8) / ((high - low) or 1.0)
    pieces: list[list[str]] = [[]]
    faults = []
    for row in shown:
        x = (row.step - first) * across
        if math.isfinite(row.loss):
            y = HEIGHT - 4 - (row.loss - low) * up
            pieces[-1].append(f"{x:.1f},{y:.1f}")
        else:
            faults.append(round(x, 1))
            pieces.append([])
    return Curve(
        pieces=[" ".join(piece) for piece in pieces if piece],
        faults=faults,
        low=low,
        high=high,
        first=first,
        last=last,
    )


def _height(row: Loss) -> float:
    return row.loss if math.isfinite(row.loss) else math.inf
