"""What a transform did to a model, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from .install import find_scope
from .simulate import Simulate
from .steps import Row
from .unit_scale import UnitScale

__all__ = ["Report", "report"]


class Report(Sequence[Row]):
    """The rows of a report; printed, a table of them. See `report`."""

    def __init__(self, rows: list[Row], notes: list[str]) -> None:
        self.rows = rows
        self.notes = notes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def left_alone(self) -> list[Row]:
        """The rows of what was left alone."""
        return [row for row in self.rows if row.left_alone]

    def __str__(self) -> str:
        cells = [("module", "call", "done", "why")]
        cells += [(row.path or "(model)", row.call, row.done, row.why) for row in self.rows]
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]).rstrip()
            for line in cells
        ]
        counts = Counter(row.done for row in self.rows)
        total = ", ".join(f"{count} {done}" for done, count in counts.most_common())
        return "\n".join([*lines, "", *self.notes, *([total] if total else [])])

    __repr__ = __str__


def report(model: nn.Module) -> Report:
    """One row for each weight and each call of a transformed model: what was done, and if not why.

    A row has ``path`` (of the module), ``call``, ``done`` ("scaled", "preserved", "replaced",
    "unchanged" where no factor is due, "left alone" where there is no rule) and ``why``. The calls
    are known after the first call of the model; each form of call (training, evaluation, other
    arguments) adds those it makes.
    Raises ValueError for a model without a transform.
    """
    scope, simulation = find_scope(model, UnitScale), find_scope(model, Simulate)
    if scope is None and simulation is None:
        raise ValueError(f"{type(model).__name__} has no transform to report on")
    notes = []
    if scope is not None and not scope.plans:
        notes.append("The model has not run yet: its calls are not known.")
    if simulation is not None:
        recipe = simulation.recipe
        parts = ((what, getattr(recipe, what)) for what in ("input", "weight", "grad"))
        casts = ", ".join(f"{what} {cast.format}" for what, cast in parts if cast is not None)
        notes.append(f"Products are simulated: {casts}.")
    return Report([] if scope is None else scope.report(), notes)
