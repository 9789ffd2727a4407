"""Reports: what was done to each module of a model, or why it was left alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import nn

T = TypeVar("T")
R = TypeVar("R", bound=Any)

LEFT_ALONE = "left alone"
_NOTES = "fp8_notes"


@dataclass(frozen=True)
class Row:
    """A row of a report. path: the module's name. what: its type, or a parameter or call in
    it. done: the action."""

    path: str
    what: str
    done: str
    why: str = ""

    @property
    def left_alone(self) -> bool:
        return self.done == LEFT_ALONE


class Change(NamedTuple):
    """What `fp8.report` and `fp8.revert` do for modules that another function than `fp8.convert`
    changed: the rows of a model, and how to undo the change in place."""

    rows: Callable[[nn.Module], list[Row]]
    revert: Callable[[nn.Module], None]


CHANGES: list[Change] = []
"""Added to by the modules that change models, when they are imported."""


class Rows(list[T]):
    """A list of rows, with notes."""

    def __init__(
        self,
        rows: Iterable[T],
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__(rows)
        self.notes = list(notes)


class Report(Rows[R]):
    """A report whose rows start with path, subject, action and reason. It prints as a table.

    heading: the title of the second column.
    """

    def __init__(
        self,
        rows: Iterable[R],
        notes: Iterable[str] = (),
        *,
        heading: str = "type",
    ) -> None:
        super().__init__(rows, notes)
        self.heading = heading

    @property
    def left_alone(self) -> list[R]:
        return [row for row in self if row.left_alone]

    def __str__(self) -> str:
        cells = [("module", self.heading, "done", "why")]
        for row in self:
            # Rows of other reports have more fields.
            path, *others = list(vars(row).values())[:4]
            cells.append((path or "(model)", *others))
        counts = Counter(row.done for row in self).most_common()
        total = ", ".join(f"{count} {done}" for done, count in counts)
        lines = [as_table(cells), "", *self.notes]
        if total:
            lines.append(total)
        return "\n".join(lines)

    __repr__ = __str__


def as_table(cells: Sequence[Sequence[str]]) -> str:
    """Formats rows of equal length as a table; each column is as wide as its widest cell."""
    columns = zip(*cells, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for line in cells:
        padded = map(str.ljust, line, widths)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def note(model: object, line: str) -> None:
    """Stores ``line`` on the model; reports on it show the line."""
    vars(model)[_NOTES] = (*notes_on(model), line)


def notes_on(model: object) -> tuple[str, ...]:
    """The lines stored by `note`."""
    return vars(model).get(_NOTES, ())


def finite(value: Any, other: Callable[[float], object] = lambda number: None) -> Any:
    """The value, for JSON, with ``other``, by default None, of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(part, other) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part, other) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return other(value)
    return value
