"""Rows of a report as JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any, TypeVar

from fp8.common.report import Rows

T = TypeVar("T")


class Serializable(Rows[T]):
    """Rows that are dataclasses, or dicts with equal keys."""

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the rows as a JSON list of objects, and writes them to ``path`` if given.

        NaN and infinities become null, as JSON does not support them.
        """
        plain = [
            {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in row.items()
            }
            for row in map(_as_dict, self.rows)
        ]
        return _written(json.dumps(plain, indent=1, allow_nan=False), path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Returns the rows as CSV with a header, and writes them to ``path`` if given."""
        out = io.StringIO()
        if self.rows:
            writer = csv.DictWriter(out, list(_as_dict(self.rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(_as_dict, self.rows))
        return _written(out.getvalue(), path)


def _as_dict(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else dataclasses.asdict(row)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
