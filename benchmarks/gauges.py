"""What do gauges do to the gradients of a model, and how long do they hold?

``python -m benchmarks.gauges --data FILE`` measures the gradients of a Llama before and after
`unit_scale`, then trains four small models of different kinds for 600 steps with the gauges of the
first step, and plain with static scales of the first step. It draws docs/gauges.png.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import fp8
import unit_scaling as uu
from benchmarks.common import THREADS, Row, report
from benchmarks.drifting import CONTEXT, HELD_OUT, Batch, Task, tasks
from notebooks.nanogpt.data import load_corpus
from unit_scaling.transforms import unit_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

FIGURE = Path(__file__).parent.parent / "docs" / "gauges.png"
AT = (0, 50, 100, 200, 300, 450, 600)
"""The steps at which a model is measured; the last ends the training."""

WARMUP = 50
LAST_RATE = 0.1  # of the peak, at the end
SLOW = {"norm": 1 / 32, "bias": 1 / 32}  # docs/learning-rates.md says why
LLAMA = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 256, "intermediate_size": 192}
LENGTH = 64

KINDS = {
    "gradients": ("gradient", "query-key gradient"),
    "weight gradients": ("weight gradient",),
    "activations": ("activation", "output"),
}
"""What a row is of -> the kinds of `uu.verify`."""

Sizes = dict[str, dict[str, float]]
"""What it is of -> which tensor -> the binary logarithm of its RMS."""


def sizes(model: nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> Sizes:
    """Those of one step, in the order of the forward pass; without tensors of zeros."""
    rows = uu.verify(model, batch, loss=loss).rows
    found: Sizes = {name: {} for name in KINDS}
    for number, row in enumerate(rows):
        for name, kinds in KINDS.items():
            if row.kind in kinds and row.rms > 0:
                found[name][f"{number} {row.path}: {row.call}"] = math.log2(row.rms)
    return found


# Before and after


def llama() -> dict[str, Sizes]:
    """Of a plain Llama and of the same unit-scaled, with the loss that it makes itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA, num_attention_heads=4, max_position_embeddings=LENGTH)
    plain = LlamaForCausalLM(config)
    ids = torch.randint(config.vocab_size, (8, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    scaled = unit_scale(plain)
    scaled(**batch).loss.backward()
    return {"plain": sizes(plain, batch), "unit-scaled": sizes(scaled, batch)}


# Drift


def rate(step: int) -> float:
    """The share of the peak learning rate: a warmup, then a cosine down to LAST_RATE."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, AT[-1] - WARMUP)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def train(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    look: Callable[[Batch], Sizes],
) -> dict[str, Sizes]:
    """Step -> what ``look`` sees with the held-out batch, before that step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    held_out, found = task.batch(HELD_OUT), {}
    for step in range(AT[-1] + 1):
        if step in AT:
            found[f"step_{step}"] = look(held_out)
        if step < AT[-1]:
            optimizer.zero_grad()
            task.value(model(*task.batch(step))).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        loss = task.value(model(*held_out)).item()
    print(f"{task.name:14} {type(model).__name__:24} held-out loss {loss:.4f}", flush=True)
    return found


def gauged(task: Task) -> dict[str, Sizes]:
    """Of a unit-scaled model with the gauges of its first step; at last, with new ones."""
    torch.manual_seed(0)
    model = unit_scale(task.build())
    for _ in range(2):  # a loss outside of the model is known after the first of them
        task.value(model(*task.batch(0))).backward()
    parameters = model.parameters()
    optimizer = uu.optim.AdamW(parameters, lr=task.unit_lr, lr_mult=SLOW, weight_decay=0)
    found = train(task, model, optimizer, lambda batch: sizes(model, batch, task.loss))
    uu.recalibrate(model, task.batch(AT[-1]), loss=task.loss)
    return found | {"recalibrated": sizes(model, task.batch(HELD_OUT), task.loss)}


def static(task: Task) -> dict[str, Sizes]:
    """Of a plain model under recipe "static", calibrated at its first step: how far the scales that
    a new calibration finds are from those in force, in octaves."""
    torch.manual_seed(0)
    model = fp8.convert(task.build(), "static")
    start = fp8.calibrate(model, task.batch(0), task.loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0)

    def moved(batch: Batch) -> Sizes:
        now = fp8.calibrate(copy.deepcopy(model), batch, task.loss)
        pairs = {name: (now[name], start[name]) for name in start}
        known = {name: (a, b) for name, (a, b) in pairs.items() if None not in (a, b)}
        return {"static scales": {name: float(a - b) for name, (a, b) in known.items()}}

    return train(task, model, optimizer, moved)


# Rows


def quantiles(values: Mapping[str, float]) -> dict[str, float]:
    """Median, the middle 90 %, all, and the share within [1/4, 4], of logarithms."""
    numbers = list(values.values())
    low, median, high = np.quantile(numbers, (0.05, 0.5, 0.95)).tolist()
    inside = statistics.fmean(abs(number) <= 2 for number in numbers)
    found = {"median": median, "low": low, "high": high, "min": min(numbers), "max": max(numbers)}
    return {name: round(value, 2) + 0.0 for name, value in (found | {"inside": inside}).items()}


def rows(name: str, found: Mapping[str, Sizes], ofs: Mapping[str, str] | None = None) -> list[Row]:
    """One row for each thing measured: a cell "median (5 % to 95 %)" for each time."""
    result = []
    for of in next(iter(found.values())):
        details = {when: quantiles(each[of]) for when, each in found.items()}
        cells = {when: _cell(each) for when, each in details.items()}
        result.append({"name": name, "of": (ofs or {}).get(of, of), **cells, "details": details})
    return result


def _cell(each: Mapping[str, float]) -> str:
    median, low, high = (round(each[key], 1) + 0.0 for key in ("median", "low", "high"))
    return f"{median} ({low} to {high})"  # no -0.0


def moves(found: Mapping[str, Sizes]) -> dict[str, Sizes]:
    """How far each gradient has gone from where it was at the first step, in octaves."""
    (_, start), *later = found.items()
    first = start["gradients"]
    return {
        when: {"gradients, moved": {k: v - first[k] for k, v in each["gradients"].items()}}
        for when, each in later
        if when != "recalibrated"
    }


# The figure: Okabe and Ito's colours

PLAIN, SCALED, WEIGHTS, GREY = "#D55E00", "#0072B2", "#009E73", "#666666"
BAND = "#EEF3F7"
SMALL: Any = {"frameon": False, "fontsize": 7.5, "borderaxespad": 0.1}
TINY = math.log2(fp8.FORMATS["e5m2"].min_subnormal)


def draw(before_after: Mapping[str, Sizes], drift: Mapping[str, Mapping[str, Sizes]]) -> Figure:
    """Left the gradients of a Llama before and after, right the drift of each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 4.7), dpi=180, layout="constrained")
    left, right = figure.subfigures(1, 2, wspace=0.03)
    _draw_products(left, before_after)
    _draw_drift(right, drift)
    return figure


def _draw_products(figure: SubFigure, found: Mapping[str, Sizes]) -> None:
    """A dot for each product, in the order of the forward pass, a square for its weight."""
    figure.suptitle("Gradients of a Llama at its first step", x=0.02, ha="left", fontsize=11)
    axes = figure.subplots()
    numbers = {int(k.split()[0]): k.split()[1] for each in found["plain"].values() for k in each}
    paths = list(dict.fromkeys(numbers[n] for n in sorted(numbers)))
    for name, color in (("plain", PLAIN), ("unit-scaled", SCALED)):
        looks = (
            ("gradients", "of the output", {"fmt": "o-", "lw": 0.7}),
            ("weight gradients", "of the weight", {"fmt": "s", "mfc": "white"}),
        )
        for of, what, style in looks:
            x = [paths.index(key.split()[1]) for key in found[name][of]]
            y = list(found[name][of].values())
            axes.errorbar(x, y, color=color, ms=3.5, label=f"{name}, {what}", **style)
    axes.axhline(TINY, color=GREY, lw=0.8, ls=(0, (4, 3)), label="smallest number of e5m2")
    _frame(axes, step=4)
    axes.set_ylim(-22, 4.5)
    tiny, band, *dots = axes.get_legend_handles_labels()[0]
    handles = [*dots[:2], tiny, *dots[2:], band]  # by column
    axes.legend(handles=handles, ncols=2, loc="lower left", bbox_to_anchor=(-0.03, 1), **SMALL)
    axes.set_ylabel("RMS of gradients", fontsize=9)
    blocks = [path.split(".")[2] if "layers." in path else "" for path in paths]
    for block in sorted(set(blocks) - {""}):
        members = [i for i, other in enumerate(blocks) if other == block]
        axes.axvline(members[0] - 0.5, color="#DDDDDD", lw=0.7, zorder=0.5)
        axes.axvline(members[-1] + 0.5, color="#DDDDDD", lw=0.7, zorder=0.5)
    centres = {b: statistics.fmean(i for i, o in enumerate(blocks) if o == b) for b in blocks if b}
    axes.set_xticks(list(centres.values()), [f"layer {int(b) + 1}" for b in centres], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("products, in the order of the forward pass", color=GREY, fontsize=9)


def _draw_drift(figure: SubFigure, drift: Mapping[str, Mapping[str, Sizes]]) -> None:
    """Axes for each model: the median and the middle 90 % of its gradients over the steps."""
    title = "Gradients in training, with the gauges of step 0"
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    grid = figure.subplots(2, (len(drift) + 1) // 2, sharex=True, sharey=True, squeeze=False)
    for axes, (name, found) in zip(grid.flat, drift.items(), strict=False):
        each = [quantiles(found[f"step_{step}"]["gradients"]) for step in AT]
        low, median, high = ([q[key] for q in each] for key in ("low", "median", "high"))
        axes.fill_between(AT, low, high, color=SCALED, alpha=0.25, lw=0, label="5 % to 95 %")
        axes.plot(AT, median, "o-", color=SCALED, ms=2.5, label="median")
        last = quantiles(found["recalibrated"]["gradients"])
        around = [[last["median"] - last["low"]], [last["high"] - last["median"]]]
        end, style = 1.07 * AT[-1], {"color": WEIGHTS, "ms": 4, "capsize": 2.5, "lw": 1.2}
        axes.errorbar(end, last["median"], around, fmt="D", label="recalibrated", **style)
        axes.set_title(name, loc="left", fontsize=9.5)
        _frame(axes, step=2)
    grid[0, 0].set_ylim(-4.6, 4.6)
    grid[0, -1].legend(loc="lower right", **SMALL)
    for axes in grid[-1]:
        axes.set_xlabel("training step", color=GREY, fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("RMS of gradients", fontsize=9)


def _frame(axes: Axes, step: int) -> None:
    """What all axes share: powers of two, and the range in which an RMS should be."""
    from matplotlib.ticker import MultipleLocator

    axes.axhspan(-2, 2, color=BAND, zorder=0, label="[1/4, 4]")
    axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.yaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    axes.tick_params(colors=GREY, labelsize=8)


def main() -> int:
    """Measures, prints the rows, records them and draws the figure."""
    parser = argparse.ArgumentParser(prog="benchmarks.gauges", description=__doc__)
    parser.add_argument("--data", help="text to train on (default: the standard library's source)")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    corpus = load_corpus(args.data, context=CONTEXT)
    before_after = llama()
    result = [
        row
        for name, found in before_after.items()
        for row in rows(f"Llama, {name}", {"step_0": found})
    ]
    drift = {}
    for task in tasks(corpus):
        drift[task.name] = found = gauged(task)
        result += rows(task.name, found) + rows(task.name, moves(found))
        result += rows(f"{task.name}, plain", static(task))
    question = (
        "log2 of the RMS of gradients and activations at products, median (5 % to 95 %): of a "
        f"Llama before and after unit_scale, and of models in {AT[-1]} steps of training with the "
        "gauges of the first step, at last recalibrated; moved: since step 0, of each product; "
        "static scales: how far those of step 0 are from a new fp8.calibrate, in octaves. "
        f"Texts: {corpus.name}"
    )
    report("gauges", question, result)
    draw(before_after, drift).savefig(FIGURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
