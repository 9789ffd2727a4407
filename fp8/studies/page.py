"""The page of `fp8 preflight`: its findings as one HTML file that loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

from ..common.libraries import need
from ..formats.format import FORMATS
from .figures import frontier, losses
from .findings import Candidate, CastScore, Estimate, Findings, OperandRange, Product

_PRODUCTS = {
    "forward": "forward",
    "grad_input": "input gradient",
    "grad_weight": "weight gradient",
    "": "whole layer",
}
_OPERANDS = {"input": "input", "weight": "weight", "grad": "gradient", "": "all casts"}
_LEVELS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # shares of the error at which the colour changes
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def page(findings: Findings) -> str:
    """The findings of a preflight as an HTML page.

    The page is one file without references to others. Figures are SVG in the colours of the page,
    which has a light and a dark style. Equal findings give the same text.

    Args:
        findings: of `fp8.preflight`, complete or not. What is absent is said to be not measured.

    Returns:
        The HTML document.

    Raises:
        ImportError: if jinja2 or matplotlib is missing: ``pip install
            'unit-scaling-fp8[preflight]'``.
    """
    jinja2 = need("jinja2")
    from markupsafe import Markup, escape  # what jinja2 escapes with

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "breakable": lambda name: escape(name).replace(".", Markup(".<wbr>")),
        "bytes": _bytes,
        "number": _number,
        "percent": _percent,
        "plain": _plain,
        "power": _power,
        "seconds": _seconds,
        "signed": _signed,
    }
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        findings=findings,
        snapshots=sorted({step for row in findings.candidates for step in row.errors}),
        axis=_axis(findings.candidates),
        maps=_maps(findings),
        levels=_LEVELS,
        flops=sum(product.flops for product in findings.products),
        frontier=frontier(findings.choices),
        losses=losses(findings.runs),
        memories=_memories(findings.estimates),
        policy=json.dumps(findings.policy, indent=2) if findings.policy else "",
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


def _seconds(value: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{_number(value / size)} {unit}"
    return f"{_number(value / 1e-9)} ns"


def _bytes(count: float) -> str:
    for size, unit in _UNITS:
        if count >= size:
            return f"{_number(count / size)} {unit}"
    return f"{count} B"


def _power(exponent: int) -> str:
    """2 to this power."""
    return "2" + str(exponent).translate(_RAISED)


def _plain(value: Any) -> str:
    """A setting, in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return (
            f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
            if abs(value) >= 10_000
            else str(value)
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


# The axis of the gaps


class _Tick(NamedTuple):
    """x: where, in units of the drawing. text: its label."""

    x: float
    text: str


class _Axis(NamedTuple):
    """Where gaps are drawn: linear up to ``unit``, logarithmic beyond (asinh)."""

    unit: float
    low: float
    high: float
    ticks: list[_Tick]

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
            far = all(abs(axis.x(gap) - tick.x) >= 40 for tick in axis.ticks)
            if axis.low <= gap <= axis.high and far:
                axis.ticks.append(_Tick(axis.x(gap), f"{gap:+g}".replace("-", "−") if gap else "0"))
    return axis


# The map of the model


class _Cell(NamedTuple):
    """error: squared update error, None where not measured. share: of the sum. level: of colour."""

    error: float | None
    share: float
    level: int


class _Bar(NamedTuple):
    """A binade of a histogram. lost: its values become zero or saturate."""

    x: float
    width: float
    height: float
    lost: bool


class _Band(NamedTuple):
    """A range of magnitudes: "subnormal" or "normal"."""

    name: str
    x: float
    width: float


class _Histogram(NamedTuple):
    """The magnitudes of an operand against the range of its format."""

    of: OperandRange
    operand: str
    bars: list[_Bar]
    bands: list[_Band]
    ticks: list[_Tick]
    limits: str


class _Row(NamedTuple):
    """A layer."""

    layer: str
    product: Product | None
    cells: list[_Cell]
    histograms: list[_Histogram]


class _Map(NamedTuple):
    """The errors of one recipe at one snapshot. groups: heading -> number of columns. columns:
    heading -> whether it sums other columns."""

    recipe: str
    step: int | None
    groups: dict[str, int]
    columns: list[str]
    rows: list[_Row]


def _maps(findings: Findings) -> list[_Map]:
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


def _map(findings: Findings, recipe: str, step: int | None) -> _Map:
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
        _Row(
            layer,
            products.get(layer),
            [_cell(scores.get((layer, *column)), total) for column in columns],
            [_histogram(row) for row in ranges if row.layer == layer],
        )
        for layer in layers
    ]
    return _Map(recipe, step, groups, [_OPERANDS[operand] for _, operand in columns], rows)


def _cell(score: CastScore | None, total: float) -> _Cell:
    if score is None:
        return _Cell(None, 0.0, 0)
    error = score.squared_error
    share = error / total if total and math.isfinite(error) else error
    level = sum(share >= bound for bound in _LEVELS) if math.isfinite(share) else len(_LEVELS)
    return _Cell(error, share, level)


def _histogram(row: OperandRange) -> _Histogram:
    """In a drawing of 320 by 100; bars are at most 80 high."""
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
        bars.append(_Bar(x(exponent), round(0.9 * scale, 1), height, lost))
    if format is not None:
        normal = format.min_exponent
        edges = {"subnormal": (smallest, normal), "normal": (normal, top)}
        bands = [_Band(name, x(a), round(x(b) - x(a), 1)) for name, (a, b) in edges.items()]
        limits = (
            f"min subnormal {_power(smallest)}, min normal {_power(normal)}, max {format.max:g}"
        )
    every = 4 if high - low <= 28 else 8 if high - low <= 56 else 16
    ticks = [_Tick(x(e), _power(e)) for e in range(low, high + 1) if e % every == 0]
    return _Histogram(row, _OPERANDS.get(row.operand, row.operand), bars, bands, ticks, limits)


# Memory


class _Memory(NamedTuple):
    """The memory of a policy, which estimates for several devices have in common."""

    candidate: str
    hardware: list[str]
    parts: list[str]
    levels: dict[str, dict[str, int]]


def _memories(estimates: Sequence[Estimate]) -> list[_Memory]:
    found: list[_Memory] = []
    for row in estimates:
        same = [m for m in found if (m.candidate, m.levels) == (row.candidate, row.memory)]
        if same:
            same[0].hardware.append(row.hardware)
        elif row.memory:
            parts = list(dict.fromkeys(part for level in row.memory.values() for part in level))
            found.append(_Memory(row.candidate, [row.hardware], parts, row.memory))
    return found
