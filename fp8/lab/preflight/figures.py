"""The figures of the preflight's page: matplotlib's SVG, in colours that the page's style sets."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...common.libraries import need
from .findings import Choice, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = npt.NDArray[np.float64]
Curve = tuple[str, Values]
"""The name of a policy, and a value for each step, NaN where not finite."""

_INK, _LINE = "#010101", "#020202"  # of the text, of the grid
_SERIES = [f"#03030{i}" for i in range(5)]
_DASHES = {"solid": "-", "dashed": "--", "dotted": ":"}  # CSS border style -> matplotlib's
_MARKS = {"△": "^", "□": "s", "◇": "D", "▽": "v", "☆": "*", "✕": "x"}  # character -> matplotlib's
_POINTS = 400  # of a loss curve
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(
        ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], _INK
    ),
}


class Key(NamedTuple):
    """A row of a legend. series: number of the colour, -1 for that of the text. line: a CSS border
    style, or "". mark: a character, or ""."""

    text: str
    series: int
    line: str = ""
    mark: str = ""


class Drawing(NamedTuple):
    """svg: the element, without text from outside. label: what it shows, in words. keys: its
    legend."""

    svg: str
    label: str
    keys: list[Key]


def _as_svg(figure: Figure, salt: str) -> str:
    """The figure in the page's colours. salt: makes identifiers of a page's figures distinct."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
        figure.savefig(text, format="svg", metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for all the page
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg class="plot" \1>', svg, count=1)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    svg = re.sub(r"#03030(\d)", r"var(--series-\1)", svg)
    return svg.replace(_INK, "currentColor").replace(_LINE, "var(--line)").strip()


@contextmanager
def _new_figure(height: float) -> Iterator[Figure]:
    """A figure that is drawn in the page's style, whatever the user's matplotlibrc says."""
    need("matplotlib")
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):
        yield Figure(figsize=(5.2, height), layout="constrained")


def _shown(value: float | None) -> float:
    """The value if a logarithmic axis can show it, else NaN, which is not drawn."""
    return value if value is not None and math.isfinite(value) and value > 0 else math.nan


def frontier(choices: Sequence[Choice]) -> Drawing | None:
    """The share of FLOPs that is cast against the update error, by recipe. None if no error is
    positive and finite."""
    drawn = [c for c in choices if _shown(c.predicted) > 0 or _shown(c.measured) > 0]
    if not drawn:
        return None
    recipes = list(dict.fromkeys(choice.recipe for choice in drawn))
    names = list(dict.fromkeys(choice.name for choice in drawn if choice.published))
    marks = {name: list(_MARKS)[i % len(_MARKS)] for i, name in enumerate(names)}
    keys = []
    for i, recipe in enumerate(recipes):
        keys.append(Key(f"{recipe}: predicted", i % len(_SERIES), line=_dash(i)))
        keys.append(Key(f"{recipe}: measured", i % len(_SERIES), mark="●"))
    keys += [Key("chosen", -1, mark="○")] if any(choice.chosen for choice in drawn) else []
    keys += [Key(name, -1, mark=mark) for name, mark in marks.items()]
    with _new_figure(3.8) as figure:
        axes = figure.subplots()
        for i, recipe in enumerate(recipes):
            _frontier_of(axes, i, [c for c in drawn if c.recipe == recipe], marks)
        axes.set_xlabel("share of the products' FLOPs that is cast (%)")
        axes.set_ylabel("update error")
        _log_axis(axes, [v for c in drawn for v in (c.predicted, c.measured)])
        svg = _as_svg(figure, "frontier")
    return Drawing(svg, f"Update error against share of FLOPs cast, {len(drawn)} selections.", keys)


def _dash(series: int) -> str:
    return list(_DASHES)[series % len(_DASHES)]


def _frontier_of(axes: Axes, i: int, choices: list[Choice], marks: dict[str, str]) -> None:
    colour = _SERIES[i % len(_SERIES)]
    line = sorted((c for c in choices if not c.published), key=lambda c: c.share)
    shares, predicted = [100 * c.share for c in line], [_shown(c.predicted) for c in line]
    axes.plot(shares, predicted, color=colour, linestyle=_DASHES[_dash(i)], linewidth=1.6)
    measured = [_shown(c.measured) for c in line]
    axes.plot(shares, measured, "o", color=colour, markersize=5)
    for choice in choices:
        share, error = 100 * choice.share, _shown(choice.measured)
        error = error if error > 0 else _shown(choice.predicted)
        if choice.published:
            mark = _MARKS[marks[choice.name]]
            axes.plot(share, error, mark, color=colour, markersize=7, fillstyle="none")
        if choice.chosen:
            axes.plot(share, error, "o", color=_INK, markersize=12, fillstyle="none")


def _log_axis(axes: Axes, values: Iterable[float | None]) -> None:
    from matplotlib import ticker

    positive = [value for value in map(_shown, values) if value > 0]
    wide = max(positive) > 300 * min(positive)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1,) if wide else (1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def losses(runs: Sequence[Run]) -> Drawing | None:
    """The losses of each policy, and below them the difference to the reference, paired by seed.
    None if no loss is finite."""
    runs = [run for run in runs if np.isfinite(run.losses).any()]
    if not runs:
        return None
    curves = [(run.name, _smooth(run.losses)) for run in runs]
    differences = _differences(runs)
    names = sorted(dict.fromkeys(run.name for run in runs), key=lambda name: name != "reference")
    keys = [
        Key(name, -1 if name == "reference" else i % len(_SERIES), _dash(i))
        for i, name in enumerate(names)
    ]
    with _new_figure(5.4 if differences else 3.2) as figure:
        panels = figure.subplots(2 if differences else 1, 1, sharex=True, squeeze=False)[:, 0]
        for axes, drawn in zip(panels, (curves, differences), strict=False):
            for key in keys:
                _draw_curves(axes, key, [values for name, values in drawn if name == key.text])
        _frame(panels[0], curves)
        if differences:
            _frame_differences(panels[1], differences, float(np.ptp(panels[0].get_ylim())))
        panels[-1].set_xlabel("step")
        svg = _as_svg(figure, "losses")
    return Drawing(svg, f"Training loss by step of {', '.join(names)}.", keys)


def _differences(runs: Sequence[Run]) -> list[Curve]:
    base = {run.seed: _smooth(run.losses) for run in runs if run.name == "reference"}
    curves = []
    for run in runs:
        if run.name != "reference" and run.seed in base:
            steps = min(len(run.losses), len(base[run.seed]))
            curves.append((run.name, _smooth(run.losses)[:steps] - base[run.seed][:steps]))
    return curves


def _smooth(losses: Sequence[float]) -> Values:
    """Means over the last fiftieth of the steps; NaN where a loss among them is not finite."""
    values = np.asarray(losses, dtype=float)
    values = np.where(np.isfinite(values), values, np.nan)
    window = max(1, len(values) // 50)
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


def _draw_curves(axes: Axes, key: Key, curves: list[Values]) -> None:
    """Thin lines for the curves of one policy, a thick one for their mean while all are finite."""
    steps = min((len(curve) for curve in curves), default=0)
    if not steps:
        return
    colour = _INK if key.series < 0 else _SERIES[key.series]
    for curve in curves:
        at = np.arange(0, len(curve), max(1, len(curve) // _POINTS))
        axes.plot(at, curve[at], color=colour, linewidth=0.6, alpha=0.45)
        end = np.flatnonzero(np.isfinite(curve)).max(initial=-1)
        if 0 <= end < len(curve) - 1:  # at the top of the axes: the curve may leave them
            axes.plot(end, 0.97, "x", color=colour, transform=axes.get_xaxis_transform())
    mean = np.mean([curve[:steps] for curve in curves], axis=0)
    at = np.arange(0, steps, max(1, steps // _POINTS))
    mark = "." if np.isfinite(mean).sum() < 3 else ""
    line = _DASHES[key.line]
    axes.plot(at, mean[at], color=colour, linewidth=1.8, linestyle=line, marker=mark)


def _frame(axes: Axes, curves: list[Curve]) -> None:
    """From the smallest loss to the largest one of the reference: what diverges leaves the axes."""
    axes.set_ylabel("training loss")
    reference = [curve for curve in curves if curve[0] == "reference"]
    low, high = _finite(curves).min(), _finite(reference or curves).max()
    if high > low:
        pad = 0.05 * (high - low)
        axes.set_ylim(low - pad, high + pad)


def _finite(curves: Iterable[Curve]) -> Values:
    values = np.concatenate([values for _, values in curves])
    return values[np.isfinite(values)]


def _frame_differences(axes: Axes, differences: list[Curve], largest: float) -> None:
    """Linear up to about the median difference, logarithmic beyond, up to ``largest``."""
    from matplotlib import ticker

    axes.axhline(0, color=_INK, linewidth=1)
    axes.set_ylabel("minus reference")
    values = np.clip(_finite(differences), -largest, largest)
    if values.any():
        width = float(np.median(abs(values[values != 0])))
        axes.set_yscale("asinh", linear_width=width)
        axes.set_ylim(1.5 * min(values.min(), -width), 1.5 * max(values.max(), width))
        decades = 10.0 ** np.arange(math.ceil(math.log10(width)), 10)
        axes.yaxis.set_major_locator(ticker.FixedLocator([*-decades, 0, *decades]))
    sign = ticker.FuncFormatter(lambda v, _: f"{v:+g}".replace("-", "−") if v else "0")
    axes.yaxis.set_major_formatter(sign)
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
