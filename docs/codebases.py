"""The generated parts of docs/codebases.md: the losses of benchmarks.codebases, and its diff."""

from __future__ import annotations

from benchmarks.codebases import DIFF
from docs.markdown import table
from docs.questions import record

COLUMNS = ("float32", "float32, best rate", "FP8", "unit_scale", "unit_scale, FP8")


def losses() -> str:
    """The table, and what it was measured on."""
    found = record("codebases")
    lines = []
    for row in found["rows"]:
        name = f"{row['name']} ({row['commit']})"
        cells = [_cell(row.get(column)) for column in COLUMNS]
        if "best rate" in row:
            cells[1] += f" at {row['best rate']:g}"
        lines.append([name, *cells, row["resumed"]])
    where = found["machine"]
    headings = " | ".join(("codebase (commit)", *COLUMNS, "resumed"))
    about = (
        f"One thread of an {where['cpu']}, torch {where['torch'].partition('+')[0]}, commit "
        f"{where['commit'][:7]}."
    )
    return f"{table(headings, lines)}\n\n{about}"


def _cell(pair: list[float] | None) -> str:
    if pair is None:
        return "-"
    mean, half = pair
    return f"{mean:.3f} ± {half:.3f}"


def lines() -> str:
    """The lines that change, as a block of code."""
    return f"```diff\n{DIFF.read_text(encoding='utf-8').rstrip()}\n```"
