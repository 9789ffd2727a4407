"""The page of `fp8 preflight`: its findings as one HTML file that loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from ...common.libraries import need
from ...formats.format import FORMATS
from ..hardware import Estimate
from .figures import losses
from .findings import Candidate, CastScore, Findings, OperandRange
from .verdict import recipe_in_words

_PRODUCTS = {
    "forward": "forward",
    "grad_input": "input gradient",
    "grad_weight": "weight gradient",
    "": "whole layer",
}
_OPERANDS = {"input": "input", "weight": "weight", "grad": "gradient", "": "all casts"}
_LEVELS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # shares of the error at which the colour changes
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Variables = dict[str, Any]
"""Of the template, by name."""


def page(findings: Findings) -> str:
    """The findings of a preflight, complete or not, as one HTML document without references to
    other files. Equal findings give the same text. Raises ImportError without the extra
    ``preflight`` (jinja2, matplotlib)."""
    jinja2 = need("jinja2")
    from markupsafe import Markup, escape  # what jinja2 escapes with

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "breakable": lambda name: escape(name).replace(".", Markup(".<wbr>")),
        "bytes": partial(_in_units, units=_SIZES),
        "number": _number,
        "percent": _percent,
        "plain": _plain,
        "power": _power,
        "recipe": lambda name: recipe_in_words(name).capitalize(),
        "seconds": partial(_in_units, units=_TIMES),
        "signed": _signed,
    }
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        findings=findings,
        verdict=findings.verdict,
        candidates=sorted(findings.candidates, key=lambda row: row.outcome == "not trained"),
        snapshots=sorted({step for row in findings.candidates for step in row.errors}),
        axis=_axis(findings.candidates),
        maps=_maps(findings),
        levels=_LEVELS,
        flops=sum(product.flops for product in findings.products),
        losses=losses(findings.runs),
        memories=_memories(findings.estimates),
        policy=json.dumps(findings.verdict.policy, indent=2) if findings.verdict.policy else "",
    )


# Numbers as text


def _number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "not measured"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "−∞" if value < 0 else "∞"
    return f"{value:#.3g}".rstrip(".").replace("-", "−") if value else "0"


def _signed(value: float) -> str:
    if not math.isfinite(value) or abs(value) >= 100:
        return _number(value)
    return f"{value:+.4f}".replace("-", "−")


def _percent(share: float) -> str:
    """In percent, with one digit after the point below 10 %."""
    if not math.isfinite(share):
        return _number(share)
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.{int(share < 0.0995)}f} %" if share else "0 %"


def _in_units(value: float, units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit of which there is one, or in the smallest."""
    size, unit = next((row for row in units if value >= row[0]), units[-1])
    return f"{_number(value / size)} {unit}"


def _power(exponent: int) -> str:
    """2 to this power."""
    return "2" + str(exponent).translate(_RAISED)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        text = f"{value:,}" if abs(value) >= 10_000 else str(value)
        return text.replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{value:g}" if isinstance(value, float) else str(value)


# The axis of the gaps


class _Axis(NamedTuple):
    """Where gaps are drawn: linear up to ``unit``, logarithmic beyond (asinh). ticks: x, text."""

    unit: float
    low: float
    high: float
    ticks: list[Variables]

    def x(self, gap: float) -> float:
        """From 10 to 170; of an infinite gap, the end of the axis."""
        at = math.asinh(min(max(gap, self.low), self.high) / self.unit)
        low, high = math.asinh(self.low / self.unit), math.asinh(self.high / self.unit)
        return round(10 + 160 * (at - low) / (high - low), 1)


def _axis(candidates: Sequence[Candidate]) -> _Axis | None:
    """An axis for all finite gaps and intervals, with ticks at 0 and powers of ten; None if there
    are none."""
    ends = [end for row in candidates for end in (row.gap, row.low, row.high)]
    finite = [end for end in ends if end is not None and math.isfinite(end)]
    sizes = sorted(abs(end) for end in finite if end)
    if not sizes:
        return None
    unit = 10.0 ** math.floor(math.log10(sizes[len(sizes) // 4]))
    axis = _Axis(unit, min(*finite, -unit), max(*finite, unit), [])
    for exponent in range(1 + max(0, math.ceil(math.log10(sizes[-1] / unit)))):
        for gap in (0.0, unit * 10**exponent, -unit * 10**exponent):
            far = all(abs(axis.x(gap) - tick["x"]) >= 40 for tick in axis.ticks)
            if axis.low <= gap <= axis.high and far:
                text = f"{gap:+g}".replace("-", "−") if gap else "0"
                axis.ticks.append({"x": axis.x(gap), "text": text})
    return axis


# The map of the model


def _maps(findings: Findings) -> list[Variables]:
    """One map for each recipe and snapshot with scores, the chosen recipe's first; for a recipe
    with ranges alone, a map without colours."""
    keys = dict.fromkeys((score.recipe, score.step) for score in findings.scores)
    scored = {recipe for recipe, _ in keys}
    bare = dict.fromkeys(row.recipe for row in findings.ranges if row.recipe not in scored)
    chosen = [choice.recipe for choice in findings.choices if choice.chosen]
    ordered = sorted(
        [*keys, *((recipe, None) for recipe in bare)],
        key=lambda key: (key[0] not in chosen, -1 if key[1] is None else -key[1]),
    )
    return [_map(findings, recipe, step) for recipe, step in ordered]


def _map(findings: Findings, recipe: str, step: int | None) -> Variables:
    """groups: heading -> its number of columns."""
    scores = {
        (row.layer, row.product, row.operand): row
        for row in findings.scores
        if (row.recipe, row.step) == (recipe, step)
    }
    ranges = [row for row in findings.ranges if row.recipe == recipe]
    products = {product.layer: product for product in findings.products}
    kinds = {(product, operand) for _, product, operand in scores}
    columns = [(p, o) for p in _PRODUCTS for o in _OPERANDS if (p, o) in kinds]
    whole = [row for key, row in scores.items() if key[1:] == ("", "")] or list(scores.values())
    total = sum(row.squared_error for row in whole if math.isfinite(row.squared_error))
    layers = dict.fromkeys([*products, *(key[0] for key in scores), *(r.layer for r in ranges)])
    groups: dict[str, int] = {}
    for product, _ in columns:
        groups[_PRODUCTS[product]] = groups.get(_PRODUCTS[product], 0) + 1
    rows = [
        {
            "layer": layer,
            "product": products.get(layer),
            "cells": [_cell(scores.get((layer, *column)), total) for column in columns],
            "histograms": [_histogram(row) for row in ranges if row.layer == layer],
        }
        for layer in layers
    ]
    heads = [_OPERANDS[operand] for _, operand in columns]
    return {"recipe": recipe, "step": step, "groups": groups, "columns": heads, "rows": rows}


def _cell(score: CastScore | None, total: float) -> Variables:
    """share: of the sum of squared errors. level: of the colour."""
    if score is None:
        return {"error": None}
    error = score.squared_error
    share = error / total if total and math.isfinite(error) else error
    level = sum(share >= bound for bound in _LEVELS) if math.isfinite(share) else len(_LEVELS)
    return {"error": error, "share": share, "level": level}


def _histogram(row: OperandRange) -> Variables:
    """The magnitudes of an operand against the range of its format, in a drawing of 320 by 100.
    lost: whether the values of a bar become zero or saturate."""
    filled = [row.lowest + i for i, count in enumerate(row.counts) if count]
    first, last = (filled[0], filled[-1] + 1) if filled else (row.lowest, row.lowest + 1)
    format = FORMATS.get(row.format)
    low, high = first, last
    if format is not None:  # of a wide format, the part about the values
        smallest, top = round(math.log2(format.min_subnormal)), format.max_exponent + 1
        low = min(first, max(smallest - 2, first - 24))
        high = max(last, min(top + 2, last + 24))
    scale = 300 / (high - low)

    def x(exponent: float) -> float:
        return round(10 + scale * (min(max(exponent, low), high) - low), 1)

    bars, bands, limits, peak = [], [], "", max(row.counts, default=0) or 1
    for exponent in filled:
        lost = format is not None and not smallest - 1 <= exponent < top
        height = max(1.0, round(80 * row.counts[exponent - row.lowest] / peak, 1))
        width = round(0.9 * scale, 1)
        bars.append({"x": x(exponent), "width": width, "height": height, "lost": lost})
    if format is not None:
        normal = format.min_exponent
        for name, a, b in (("subnormal", smallest, normal), ("normal", normal, top)):
            bands.append({"name": name, "x": x(a), "width": round(x(b) - x(a), 1)})
        limits = (
            f"min subnormal {_power(smallest)}, min normal {_power(normal)}, max {format.max:g}"
        )
    every = 4 if high - low <= 28 else 8 if high - low <= 56 else 16
    ticks = [{"x": x(e), "text": _power(e)} for e in range(low, high + 1) if e % every == 0]
    operand = _OPERANDS.get(row.operand, row.operand)
    drawn = {"bars": bars, "bands": bands, "ticks": ticks}
    return {"of": row, "operand": operand, "limits": limits, **drawn}


# Memory


def _memories(estimates: Sequence[Estimate]) -> list[Variables]:
    """The memory of each policy, once for the devices that have it in common."""
    memories: list[Variables] = []
    for row in estimates:
        same = [m for m in memories if (m["candidate"], m["levels"]) == (row.candidate, row.memory)]
        if same:
            same[0]["hardware"].append(row.hardware)
        elif row.memory:
            parts = list(dict.fromkeys(part for level in row.memory.values() for part in level))
            shown = {"candidate": row.candidate, "levels": row.memory, "parts": parts}
            memories.append({**shown, "hardware": [row.hardware]})
    return memories
