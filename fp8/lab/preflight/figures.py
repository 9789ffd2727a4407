"""The figure of the preflight's page: matplotlib's SVG, in colours that the page's style sets."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...common.libraries import need
from .findings import Run
from .paired_runs import REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = npt.NDArray[np.float64]
Curve = tuple[str, Values]
"""The name of a policy, and a value for each step, NaN where not finite."""

_INK, _LINE = "#010101", "#020202"  # of the text, of the grid
_SERIES = [f"#03030{i}" for i in range(5)]
_DASHES = {"solid": "-", "dashed": "--", "dotted": ":"}  # CSS border style -> matplotlib's
_REPLACED = {
    r"<style.*?</style>|<!--.*?-->": "",  # a style would hold for all of the page
    r'<g id="[^"]*"': "<g",
    r"^ [^>]*?(viewBox=\"[^\"]*\")[^>]*>": r' class="plot" \1>',
    r"'DejaVu Sans'[^;\"]*": "system-ui, sans-serif",
    r"#03030(\d)": r"var(--series-\1)",
    _INK: "currentColor",
    _LINE: "var(--line)",
}
"""Pattern in matplotlib's SVG -> what the page has in its place."""
_POINTS = 400  # of a loss curve
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "losses",  # equal figures have equal identifiers
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
    style."""

    text: str
    series: int
    line: str

    @property
    def colour(self) -> str:
        """That of matplotlib's lines."""
        return _INK if self.series < 0 else _SERIES[self.series]


class Drawing(NamedTuple):
    """svg: the element, without text from outside. label: what it shows, in words. keys: its
    legend."""

    svg: str
    label: str
    keys: list[Key]


def losses(runs: Sequence[Run]) -> Drawing | None:
    """The losses of each policy, and below them the difference to the reference, paired by seed,
    drawn in the page's style, whatever the user's matplotlibrc says. None if no loss is finite."""
    runs = [run for run in runs if np.isfinite(run.losses).any()]
    if not runs:
        return None
    need("matplotlib")
    from matplotlib import style

    names = sorted(dict.fromkeys(run.name for run in runs), key=lambda name: name != REFERENCE)
    keys = [
        Key(name, -1 if name == REFERENCE else i % len(_SERIES), [*_DASHES][i % len(_DASHES)])
        for i, name in enumerate(names)
    ]
    with style.context(["default", _STYLE]):
        svg = _as_svg(_drawn(runs, keys))
    return Drawing(svg, f"Training loss by step of {', '.join(names)}.", keys)


def _as_svg(figure: Figure) -> str:
    """The figure in the page's colours."""
    text = io.StringIO()
    nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    figure.savefig(text, format="svg", metadata=nothing)
    svg = text.getvalue().partition("<svg")[2]
    for pattern, new in _REPLACED.items():
        svg = re.sub(pattern, new, svg, flags=re.DOTALL)
    return f"<svg{svg}".strip()


def _drawn(runs: Sequence[Run], keys: Sequence[Key]) -> Figure:
    from matplotlib.figure import Figure

    curves = [(run.name, _smooth(run.losses)) for run in runs]
    differences = _differences(runs)
    figure = Figure(figsize=(5.2, 5.4 if differences else 3.2), layout="constrained")
    panels = figure.subplots(2 if differences else 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes, drawn in zip(panels, (curves, differences), strict=False):
        for key in keys:
            _draw_curves(axes, key, [values for name, values in drawn if name == key.text])
    _frame(panels[0], curves)
    if differences:
        _frame_differences(panels[1], differences, float(np.ptp(panels[0].get_ylim())))
    panels[-1].set_xlabel("step")
    return figure


def _differences(runs: Sequence[Run]) -> list[Curve]:
    base = {run.seed: _smooth(run.losses) for run in runs if run.name == REFERENCE}
    paired = [run for run in runs if run.name != REFERENCE and run.seed in base]
    curves = [(run.name, _smooth(run.losses), base[run.seed]) for run in paired]
    return [(name, a[: len(b)] - b[: len(a)]) for name, a, b in curves]


def _smooth(losses: Sequence[float]) -> Values:
    """Means over the last fiftieth of the steps; NaN where a loss among them is not finite."""
    values = np.asarray(losses, dtype=float)
    values = np.where(np.isfinite(values), values, np.nan)
    window = max(1, len(values) // 50)
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


def _draw_curves(axes: Axes, key: Key, curves: list[Values]) -> None:
    """Thin lines for the curves of one policy, a thick one for their mean while all are finite."""
    if not curves:
        return
    for curve in curves:
        at = _points(len(curve))
        axes.plot(at, curve[at], color=key.colour, linewidth=0.6, alpha=0.45)
    steps = min(map(len, curves))
    mean, at = np.mean([curve[:steps] for curve in curves], axis=0), _points(steps)
    dash = _DASHES[key.line]
    axes.plot(at, mean[at], color=key.colour, linewidth=1.8, linestyle=dash)


def _points(steps: int) -> npt.NDArray[np.int_]:
    return np.arange(0, steps, max(1, steps // _POINTS))


def _frame(axes: Axes, curves: list[Curve]) -> None:
    """From the smallest loss to the largest one of the reference: what diverges leaves the axes."""
    axes.set_ylabel("training loss")
    reference = [curve for curve in curves if curve[0] == REFERENCE]
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
