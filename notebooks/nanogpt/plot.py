"""The picture: loss curves, and how far each variant is from the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .results import BASELINE
from .variants import VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; dashes tell apart curves
# that lie on each other.
STYLES: dict[str, dict[str, Any]] = {
    "fp32": {"color": "#000000"},
    "bf16": {"color": "#E69F00", "linestyle": (0, (1, 1.2))},
    "fp8": {"color": "#D55E00"},
    "fp8_tensor": {"color": "#CC79A7", "linestyle": (0, (3, 1, 1, 1))},
    "fp8_static": {"color": "#56B4E9", "linestyle": (0, (3, 1, 1, 1))},
    "unit_scaled": {"color": "#009E73", "linestyle": (0, (5, 2))},
    "unit_scaled_fp8": {"color": "#0072B2"},
    "fp16": {"color": "#999999"},
    "fp16_mixed": {"color": "#56B4E9", "linestyle": (0, (1, 1.2))},
    "unit_scaled_fp16": {"color": "#F0E442", "linestyle": (0, (5, 2))},
}
GREY = "#666666"
LINEAR_GAP = (
    0.02  # gaps smaller than this are drawn to scale, larger ones by their logarithm
)
LABEL_SPACING = 0.055  # least distance of two labels, as a share of the axis

Curve = tuple[list[float], list[float]]


def plot_runs(runs: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Held-out losses of `runs` (rows of results.json), the mean over the seeds of each variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    losses, gaps = figure.subplots(1, 2)
    curves = {variant: _mean_curve(runs, variant, _val) for variant in STYLES}
    curves = {variant: curve for variant, curve in curves.items() if curve[0]}
    _draw(losses, curves)
    _frame_losses(losses, curves)
    _label_ends(losses, curves, "{:.3f}")
    _draw_gaps(gaps, runs)
    for axes in (losses, gaps):
        axes.set_xlabel("training step", color=GREY)
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.7)
        axes.tick_params(colors=GREY)
    return figure


def _val(run: dict[str, Any], baseline: dict[str, Any] | None) -> list[float | None]:
    return run["curves"]["val"]


def _gap(run: dict[str, Any], baseline: dict[str, Any] | None) -> list[float | None]:
    if baseline is None:
        return [None] * len(run["curves"]["val"])
    pairs = zip(run["curves"]["val"], baseline["curves"]["val"], strict=True)
    return [None if a is None or b is None else a - b for a, b in pairs]


def _mean_curve(runs: Sequence[dict[str, Any]], variant: str, values: Any) -> Curve:
    """Steps and the mean over seeds of `values(run, baseline of the same seed)`, where finite."""
    baselines = {run["seed"]: run for run in runs if run["variant"] == BASELINE}
    mine = [run for run in runs if run["variant"] == variant]
    rows = [values(run, baselines.get(run["seed"])) for run in mine]
    points: Curve = ([], [])
    for step, *column in zip(
        *(run["curves"]["step"] for run in mine[:1]), *rows, strict=True
    ):
        if all(value is not None for value in column):
            points[0].append(step)
            points[1].append(sum(column) / len(column))
    return points


def _draw(axes: Axes, curves: dict[str, Curve]) -> None:
    for variant, (steps, values) in curves.items():
        axes.plot(steps, values, linewidth=1.8, **STYLES[variant])


def _frame_losses(axes: Axes, curves: dict[str, Curve]) -> None:
    """Logarithmic, from just below the best loss to just above the worst start after step 0."""
    axes.set_yscale("log")
    axes.set_title(
        "loss on held-out text (log scale)", loc="left", fontsize=10, color=GREY
    )
    values = [value for _, curve in curves.values() for value in curve]
    if values:
        # A unit-scaled model starts far above log(vocabulary); that first point may be cut off.
        after_start = [
            value for _, curve in curves.values() for value in curve[1:]
        ] or values
        axes.set_ylim(0.96 * min(values), 1.05 * max(after_start))
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    axes.yaxis.set_major_locator(
        LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0))
    )
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(LogLocator(subs=()))


def _draw_gaps(axes: Axes, runs: Sequence[dict[str, Any]]) -> None:
    axes.set_title(
        f"the same, minus {VARIANTS[BASELINE].label}",
        loc="left",
        fontsize=10,
        color=GREY,
    )
    curves = {v: _mean_curve(runs, v, _gap) for v in STYLES if v != BASELINE}
    curves = {variant: curve for variant, curve in curves.items() if curve[0]}
    axes.set_yscale("symlog", linthresh=LINEAR_GAP, linscale=1.0)
    axes.axhline(0, **STYLES[BASELINE], linewidth=1.2)
    _draw(axes, curves)
    values = [value for _, curve in curves.values() for value in curve[1:]]
    bottom, top = min([-LINEAR_GAP, *values]), max([LINEAR_GAP, *values])
    axes.set_ylim(bottom * 1.5, top * 1.5)
    ticks = [s * t for t in (0.01, 0.1, 1.0) for s in (-1, 1)]
    axes.set_yticks([0, *(tick for tick in ticks if bottom * 1.5 <= tick <= top * 1.5)])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
    axes.minorticks_off()
    _label_ends(axes, curves, "{:+.3f}")


def _label_ends(axes: Axes, curves: dict[str, Curve], form: str) -> None:
    """Each curve's name and last value to the right of its end, moved apart where they collide."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {
        variant: (to_axes.transform((steps[-1], values[-1]))[1], values[-1])
        for variant, (steps, values) in curves.items()
        if math.isfinite(values[-1])
    }
    height = -math.inf
    for variant, (y, value) in sorted(ends.items(), key=lambda item: item[1][0]):
        height = max(y, height + LABEL_SPACING)
        axes.annotate(
            f"{VARIANTS[variant].label}  {form.format(value)}",
            xy=(1.01, height),
            xycoords="axes fraction",
            color=STYLES[variant]["color"],
            fontsize=9,
            va="center",
        )
