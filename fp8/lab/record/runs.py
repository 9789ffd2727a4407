"""The lines of a record of `fp8.record`, and the file of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...casts.watch import Seen
from ...common.report import as_table, finite

Record = dict[str, Any]
"""A line. "kind" is "header" (versions, every, start, layers: layer -> recipe), "rows" (step, rows:
the fields of each `Seen`), "loss" (step, loss) or "what if" (step, recipe, rows)."""

SHARES = ("zero", "saturated", "nonfinite")
NUMBERS = ("scale", "rms", "largest", *SHARES, "sqnr")
"""The numbers of a row."""


class Loss(NamedTuple):
    """The loss of a step."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What the casts of a recipe that was not in force would have lost in a step. Prints as a
    table.

    Attributes:
        recipe: its name.
        step: the step to which the weights belong.
        rows: what each cast would have done, in the order of execution.
    """

    recipe: str
    step: int
    rows: list[Seen]

    def __str__(self) -> str:
        heads = ["layer", "operand", "format", *SHARES, "SQNR"]
        return as_table([heads, *map(_cells, self.rows)])


def _cells(row: Seen) -> list[str]:
    shares = [f"{getattr(row, name):.3%}" for name in SHARES]
    return [row.layer, row.operand, row.format, *shares, f"{row.sqnr:.1f} dB"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a file has recorded, by steps. Where a run went on after an earlier step, the steps that
    it has made again are as the last time."""

    header: Record
    rows: list[Seen]
    losses: list[Loss]
    what_ifs: list[WhatIf] = field(default_factory=list)


def lost(row: Seen) -> float:
    """The largest of the shares of a row: what becomes zero, saturates, or is Inf or NaN."""
    return max(row.zero, row.saturated, row.nonfinite)


def rows_record(step: int, rows: list[Seen], kind: str = "rows") -> Record:
    """The line of a look."""
    return {
        "kind": kind,
        "step": step,
        "rows": [dict(vars(row)) for row in rows],
    }


def as_line(record: Record) -> str:
    """A line of the file. JSON has no Inf and NaN: they are the strings "inf", "-inf", "nan"."""
    return json.dumps(finite(record, str), allow_nan=False) + "\n"


def read(path: str | Path) -> Run:
    """Reads a file of `fp8.record`. The last line may be truncated, as after a run that was killed.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is not one of `fp8.record`, naming the line.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    run: Run | None = None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kind = record["kind"]
            if kind == "header":
                run = _begun(record, run)
            elif run is not None:
                _add(run, record)
        except (ValueError, KeyError, TypeError) as error:
            if run is not None and number == len(lines):
                break  # of a run that was killed while it wrote
            raise ValueError(
                f"{path}, line {number}: not a line of fp8.record ({error})"
            ) from error
        if run is None:
            raise ValueError(f"{path}, line 1: expected a header, got kind {kind!r}")
    if run is None:
        raise ValueError(f"{path} is empty: expected a header of fp8.record")
    return run


def _begun(header: Record, before: Run | None) -> Run:
    """The run that begins, or goes on, with a header."""
    if before is None:
        return Run(header=header, rows=[], losses=[])
    start = header.get("start", 0)
    rows = [row for row in before.rows if row.step <= start]
    losses = [row for row in before.losses if row.step <= start]
    asked = [each for each in before.what_ifs if each.step <= start]
    return Run(header=header, rows=rows, losses=losses, what_ifs=asked)


def _add(run: Run, record: Record) -> None:
    """Adds what a line has: a look, a loss or a question."""
    step = record["step"]
    if record["kind"] == "loss":
        run.losses.append(Loss(step, float(record["loss"])))
        return
    rows = [_row(fields) for fields in record["rows"]]
    if record["kind"] == "rows":
        run.rows.extend(rows)
    else:
        run.what_ifs.append(WhatIf(recipe=record["recipe"], step=step, rows=rows))


def _row(fields: Record) -> Seen:
    for name in NUMBERS:
        fields[name] = float(fields[name])
    return Seen(**fields)
