"""Rows that are written as JSON and CSV; the scales of a model over time are such rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch.fx import Graph

from fp8.common.report import Rows, as_table, finite

T = TypeVar("T")


class Serializable(Rows[T]):
    """Rows that are dataclasses, or dicts with equal keys."""

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the rows as a JSON list of objects, and writes them to ``path`` if given.

        NaN and infinities become null, as JSON does not support them.
        """
        rows = finite(list(map(_as_dict, self.rows)))
        return _written(json.dumps(rows, indent=1, allow_nan=False), path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Returns the rows as CSV with a header, and writes them to ``path`` if given."""
        out = io.StringIO()
        if self.rows:
            writer = csv.DictWriter(out, list(_as_dict(self.rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(_as_dict, self.rows))
        return _written(out.getvalue(), path)


def _as_dict(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else asdict(row)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


Pass = tuple[int, Graph]
"""(number of earlier calls of the model, graph of the measured call)."""


class History(Serializable[dict[str, Any]]):
    """The scales of a model over time: see `track_scales`.

    Attributes:
        rows: a dict for each floating-point tensor, and each gradient, of each measured call. Keys
            are "call" (the number of earlier calls of the model), "name" (of the node), "path" (of
            the module), "direction" ("fwd" or "bwd"), "weight" (whether it is a parameter), the
            names of `Metrics`, and, after the name of each format, "zero", "subnormal", "saturated"
            and "headroom".
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        super().__init__(row for call, graph in passes for row in _rows(call, graph))

    def series(
        self, name: str, metric: str = "rms", direction: str = "fwd"
    ) -> tuple[list[int], list[float]]:
        """Returns the measured calls of a tensor, and the values of a metric in them.

        Args:
            name: the name of the tensor's node.
            metric: a name of `Metrics`.
            direction: "fwd" or "bwd".

        Raises:
            ValueError: there is no row for the tensor, metric or direction.
        """
        found = [r for r in self.rows if r["name"] == name and r["direction"] == direction]
        if not found or metric not in found[0]:
            names = ", ".join(dict.fromkeys(r["name"] for r in self.rows)) or "none"
            raise ValueError(
                f"no {metric!r} of {name!r}, direction {direction!r}; directions are 'fwd' and "
                f"'bwd', tensors {names}"
            )
        return [r["call"] for r in found], [r[metric] for r in found]

    def __str__(self) -> str:
        cells = [("call", "name", "direction", "rms", "abs_max")]
        for row in self.rows:
            rms, largest = f"{row['rms']:.3g}", f"{row['abs_max']:.3g}"
            cells.append((str(row["call"]), row["name"], row["direction"], rms, largest))
        return as_table(cells)


def _rows(call: int, graph: Graph) -> Iterator[dict[str, Any]]:
    for node in graph.nodes:
        metrics = node.meta.get("metrics")
        for direction in ("fwd", "bwd"):
            if (data := getattr(metrics, direction, None)) is not None:
                place = {"call": call, "name": node.meta["clean_name"], "path": node.meta["path"]}
                about = {"direction": direction, "weight": node.meta["requires_grad"]}
                numbers = asdict(data)
                losses = numbers.pop("formats")
                formats = {f"{f}_{k}": v for f, loss in losses.items() for k, v in loss.items()}
                yield place | about | numbers | formats
