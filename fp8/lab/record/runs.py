"""The lines of a record of `fp8.record`, and the file of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...casts.watch import Seen

Record = dict[str, Any]
"""A line. "kind" is "header" (versions, every, layers: layer -> recipe), "rows" (step, rows: the
fields of each `Seen`) or "loss" (step, loss)."""

SHARES = ("zero", "saturated", "nonfinite")
NUMBERS = ("scale", "rms", "largest", *SHARES, "sqnr")
"""The numbers of a row."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a step."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a file has recorded, in its order."""

    header: Record
    rows: list[Seen]
    losses: list[Loss]


def lost(row: Seen) -> float:
    """The largest of the shares of a row: what becomes zero, saturates, or is Inf or NaN."""
    return max(row.zero, row.saturated, row.nonfinite)


def rows_record(rows: list[Seen]) -> Record:
    """The line of a look."""
    return {
        "kind": "rows",
        "step": rows[0].step,
        "rows": [asdict(row) for row in rows],
    }


def as_line(record: Record) -> str:
    """A line of the file. JSON has no Inf and NaN: they are the strings "inf", "-inf", "nan"."""
    return json.dumps(_written(record), allow_nan=False) + "\n"


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _written(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_written(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read(path: str | Path) -> Run:
    """Reads a file of `fp8.record`. The last line may be truncated, as that of a killed run.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is not one of `fp8.record`, naming the line.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    rows: list[Seen] = []
    losses: list[Loss] = []
    header: Record = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kind = record["kind"]
            if kind == "header":
                header = record
            elif kind == "loss":
                losses.append(Loss(step=record["step"], loss=float(record["loss"])))
            else:
                rows += [_row(fields) for fields in record["rows"]]
        except (ValueError, KeyError, TypeError) as error:
            if header and number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number}: not a line of fp8.record ({error})"
            ) from error
        if not header:
            raise ValueError(f"{path}, line 1: expected a header, got kind {kind!r}")
    if not header:
        raise ValueError(f"{path} is empty: expected a header of fp8.record")
    return Run(header=header, rows=rows, losses=losses)


def _row(fields: Record) -> Seen:
    numbers = {name: float(fields[name]) for name in NUMBERS}
    return Seen(**{**fields, **numbers})
