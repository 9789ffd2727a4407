"""What was done to each part of a model, and why not where nothing was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

__all__ = ["LEFT_ALONE", "Report", "Row"]

LEFT_ALONE = "left alone"


@dataclass(frozen=True)
class Row:
    """One line. path: the module's name. what: its type, or the call. done: a word or two."""

    path: str
    what: str
    done: str
    why: str = ""

    @property
    def left_alone(self) -> bool:
        return self.done == LEFT_ALONE


class Report(Sequence[Row]):
    """The rows; printed, a table with a line of counts."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def left_alone(self) -> list[Row]:
        """The rows of what was left alone."""
        return [row for row in self.rows if row.left_alone]

    def __str__(self) -> str:
        cells = [("module", "type", "done", "why")]
        cells += [(row.path or "(model)", row.what, row.done, row.why) for row in self.rows]
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        lines = ["  ".join([*map(str.ljust, line, widths), line[3]]).rstrip() for line in cells]
        counts = Counter(row.done for row in self.rows).most_common()
        return "\n".join([*lines, "", ", ".join(f"{n} {done}" for done, n in counts)])

    __repr__ = __str__
