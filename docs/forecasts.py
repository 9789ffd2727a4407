"""The tables of docs/forecast.md, from the results of `benchmarks.forecast`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.forecast import PUBLISHED
from docs.markdown import table
from docs.questions import record

Row = Mapping[str, Any]

CASES = {"linear": "layer", "head": "head", "block": "block"}
COMBINED = "block, combo_kernels"


def _rows() -> list[Row]:
    found: list[Row] = record("forecast")["rows"]
    return found


def _by_recipe() -> dict[str, dict[str, Row]]:
    """Recipe -> case -> row."""
    found: dict[str, dict[str, Row]] = {}
    for row in _rows():
        if row["case"] in (*CASES, COMBINED):
            found.setdefault(row["recipe"], {})[row["case"]] = row
    return found


def today() -> str:
    """The forecasts of the cases under every recipe."""
    lines = []
    for recipe, rows in _by_recipe().items():
        block, combined = rows["block"], rows[COMBINED]
        lines.append(
            [
                recipe,
                *(f"{rows[case]['ratio_graphs']:.2f}" for case in CASES),
                str(block["kernels"]),
                f"{block['us'] / 1e3:.2f}, {block['host_us'] / 1e3:.2f}",
                str(block["MB_saved"]),
                f"{combined['ratio_graphs']:.2f}",
                str(combined["kernels"]),
            ]
        )
    heads = "recipe | layer | head | block | kernels | ms: card, host | MB saved"
    return table(f"{heads} | combined: block | kernels", lines)


def run() -> str:
    """What was measured, beside the forecasts."""
    lines = []
    for recipe, rows in _by_recipe().items():
        if "measured" in rows["linear"] and recipe != "bf16":
            lines.append([recipe, *(_beside(rows[case]) for case in CASES)])
    titles = (f"{title}: measured, today" for title in CASES.values())
    return table(" | ".join(["recipe", *titles]), lines)


def _beside(row: Row) -> str:
    if "measured" not in row:
        return ""
    return f"{row['measured']:.2f}, {row['ratio_graphs']:.2f}"


def peaks() -> str:
    """What was measured of the peaks of compiled steps, beside the forecasts, in GB."""
    cases = (*CASES, "model")
    found: dict[str, dict[str, str]] = {}
    for row in _rows():
        if row["case"] in cases and "measured_GB" in row:
            text = f"{row['measured_GB']:.2f}, {row['peak_GB']:.2f}"
            found.setdefault(row["recipe"], {})[row["case"]] = text
    lines = [
        [recipe, *(texts.get(case, "") for case in cases)]
        for recipe, texts in found.items()
    ]
    return table("recipe | layer | head | block | model", lines)


def published() -> str:
    """Published ratios beside the forecasts."""
    return table(
        "case | bf16, ms: published, forecast | recipe | published | forecast | off",
        _published(),
    )


def _published() -> Iterator[list[str]]:
    for row in _rows():
        if row["case"] in PUBLISHED:
            yield [
                row["case"].removesuffix(f", {row['recipe']}"),
                f"{row['published_bf16_ms']:.4g}, {row['bf16_ms']:.4g}",
                row["recipe"],
                f"{row['published']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['off']:.0%}".replace("%", " %"),
            ]
