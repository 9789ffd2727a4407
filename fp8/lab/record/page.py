"""The page of ``fp8 record page``: what casts lose, by layers and steps, as one HTML file."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from ...casts.watch import Seen
from ..page import rendered
from .runs import Loss, Run, lost

COLUMNS = 60
"""Columns of the map, at most, each of as many steps. One of several looks shows the worst."""
POINTS = 1000
"""Points of the curve. If there are more losses, neighbours share a point, which shows the
largest."""
BOUNDS = (0.0, 0.001, 0.01, 0.1, 1.0)
"""The largest lost share of each colour."""
WIDTH, HEIGHT = 1000, 160
"""The curve, in units of its drawing."""
TICKS = 5
"""Labels of steps along the map, at most."""


class Cell(NamedTuple):
    """Neighbouring columns of one colour. level: index of it, -1 without a look. width: in columns.
    title: the numbers of the worst look, in words."""

    level: int
    width: int
    title: str


class Line(NamedTuple):
    """A cast, and its cells."""

    operand: str
    cells: list[Cell]


Layers = dict[str, list[Line]]
"""Layer -> its casts, in the order of execution."""


class Map(NamedTuple):
    """Casts by columns. heads: text -> columns that it spans."""

    columns: int
    heads: list[tuple[str, int]]
    layers: Layers


class Curve(NamedTuple):
    """The loss. pieces: points of each finite piece. faults: where it is Inf or NaN, along x."""

    pieces: list[str]
    faults: list[float]
    low: float
    high: float


def page(run: Run, name: str) -> str:
    """The record as one HTML document without references to other files. Equal records give the
    same text. Raises ImportError without jinja2, and ValueError if the record has no look."""
    if not run.rows:
        raise ValueError(f"{name} has no look: the training ended in its first pass")
    steps = sorted({row.step for row in run.rows})
    first = steps[0]
    last = max([steps[-1], *(row.step for row in run.losses)])
    return rendered(
        "record/page.html",
        {},
        name=name,
        header=run.header,
        first=first,
        last=last,
        map=_over_time(run, first, last),
        what_ifs=_what_ifs(run),
        curve=_curve(run.losses, first, last),
        looks=len(steps),
        worst=max(run.rows, key=lost),
        lost=lost,
        width=WIDTH,
        height=HEIGHT,
    )


def _over_time(run: Run, first: int, last: int) -> Map:
    span = last - first + 1
    columns = min(COLUMNS, span)
    placed = [((row.step - first) * columns // span, row) for row in run.rows]
    # A look stands until the next one.
    looked = sorted({column for column, _ in placed})
    shown = [looked[bisect_right(looked, i) - 1] for i in range(columns)]
    ticks = math.ceil(columns / TICKS)
    heads = []
    for column in range(0, columns, ticks):
        step = first + math.ceil(column * span / columns)
        heads.append((str(step), min(ticks, columns - column)))
    return Map(columns, heads, _layers(placed, shown))


def _what_ifs(run: Run) -> dict[int, Map]:
    """Step -> the recipes that were asked for there, beside the one in force."""
    maps = {}
    for step in dict.fromkeys(asked.step for asked in run.what_ifs):
        looks = [row.step for row in run.rows if row.step <= step]
        latest = max(looks, default=run.rows[0].step)
        placed = [(0, row) for row in run.rows if row.step == latest]
        heads = [(f"in force (step {latest})", 1)]
        for asked in run.what_ifs:
            if asked.step == step:
                placed += [(len(heads), row) for row in asked.rows]
                heads.append((asked.recipe, 1))
        columns = len(heads)
        maps[step] = Map(columns, heads, _layers(placed, range(columns)))
    return maps


def _layers(placed: Iterable[tuple[int, Seen]], shown: Sequence[int]) -> Layers:
    """placed: the column of each row. shown: that of which each column shows the rows."""
    worst: dict[str, dict[str, dict[int, Seen]]] = {}
    for column, row in placed:
        cells = worst.setdefault(row.layer, {}).setdefault(row.operand, {})
        if column not in cells or lost(row) > lost(cells[column]):
            cells[column] = row
    layers: Layers = {}
    for layer, operands in worst.items():
        lines = [Line(name, _cells(cells, shown)) for name, cells in operands.items()]
        layers[layer] = lines
    return layers


def _cells(rows: dict[int, Seen], shown: Sequence[int]) -> list[Cell]:
    """One cell for neighbours of one colour: a page of all columns of a large model has 20 MB."""
    cells = []
    found = [rows.get(column) for column in shown]
    for level, same in groupby(found, key=_level):
        group = list(same)
        seen = [row for row in group if row is not None]
        title = ""
        if seen:
            title = _title(max(seen, key=lost))
        cells.append(Cell(level, len(group), title))
    return cells


def _level(row: Seen | None) -> int:
    if row is None:
        return -1
    return bisect_left(BOUNDS, lost(row))


def _title(row: Seen) -> str:
    return (
        f"{row.layer} {row.operand} ({row.format}), step {row.step}: "
        f"{row.zero:.3%} become zero, {row.saturated:.3%} saturate, "
        f"{row.nonfinite:.3%} Inf or NaN; scale {row.scale:.3g}, RMS {row.rms:.3g}, "
        f"largest {row.largest:.3g}, SQNR {row.sqnr:.1f} dB"
    )


def _curve(losses: list[Loss], first: int, last: int) -> Curve | None:
    """The curve from one step to another; None without a finite loss."""
    finite = [row.loss for row in losses if math.isfinite(row.loss)]
    if not finite:
        return None
    low = min(finite)
    high = max(finite)
    across = WIDTH / (last - first + 1)
    # Four units above and below, so that no line is cut off; a constant loss is at the bottom.
    up = (HEIGHT - 8) / ((high - low) or 1.0)
    pieces: list[list[str]] = [[]]
    faults = []
    size = math.ceil(len(losses) / POINTS)
    for start in range(0, len(losses), size):
        # A spike of one step would be lost in a mean.
        row = max(losses[start : start + size], key=_height)
        x = (row.step - first + 0.5) * across
        if math.isfinite(row.loss):
            y = HEIGHT - 4 - (row.loss - low) * up
            pieces[-1].append(f"{x:.1f},{y:.1f}")
        else:
            faults.append(round(x, 1))
            pieces.append([])
    lines = [" ".join(piece) for piece in pieces if piece]
    return Curve(lines, faults, low, high)


def _height(row: Loss) -> float:
    if math.isfinite(row.loss):
        return row.loss
    return math.inf
