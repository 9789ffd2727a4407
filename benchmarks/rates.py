"""What does each default of `unit_scale` and `uu.optim.AdamW` contribute, and does the default
learning rate suit any depth and width?

``python -m benchmarks.rates defaults`` trains the models of `benchmarks.one_line` with the defaults
and with one of them changed at a time; ``sizes`` trains its GPT at several depths and widths, under
learning rates around the default. Run again, it continues in --out.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

import unit_scaling as uu
from benchmarks.common import Finished, Row, report
from benchmarks.one_line import MODELS, Way, gpt, held_out, options
from benchmarks.problems import Problem
from unit_scaling.optim import LR_MULT, RATES, UMUP
from unit_scaling.rules.rates import Kind
from unit_scaling.transforms import unit_scale

RATE, MULT = RATES["adam"], LR_MULT["adam"]

Loss = Callable[[dict[str, object], Problem, Way], float]
"""What a run is -> the mean of its held-out losses over the seeds."""


def changed(lr: float = 1.0, mult: Mapping[Kind, float] | None = None) -> Way:
    """unit_scale and AdamW, with a factor of the rate, or with other factors of kinds."""

    def make(parameters: Iterator[nn.Parameter], _: float) -> Optimizer:
        return uu.optim.AdamW(parameters, lr=RATE * lr, lr_mult=mult)

    return Way(unit_scale, make)


CHANGES = {
    "defaults": changed(),
    "lr x1/2": changed(lr=0.5),
    "lr x2": changed(lr=2.0),
    "gains and biases x8": changed(mult={k: 8 * MULT[k] for k in ("norm", "bias")}),
    "gains and biases at lr": changed(mult={"norm": 1.0, "bias": 1.0}),
    "kernels at the rate of matrices": changed(mult={"kernel": 1.0}),
    "readout at the rate of u-muP": changed(mult={"output": 1.0}),
    "u-muP's rates": changed(mult=UMUP),
}
"""Name -> the way with the change; the first is what the others are compared with."""


def defaults(models: Sequence[str], loss: Loss) -> list[Row]:
    """A row for each change: how far the loss of each model is above that with the defaults."""
    rows: list[Row] = [{"name": name} for name in CHANGES]
    for model in models:
        losses = [
            loss({"model": model, "change": name}, MODELS[model], way)
            for name, way in CHANGES.items()
        ]
        rows[0][model] = round(losses[0], 3)
        for row, changed_loss in zip(rows[1:], losses[1:], strict=True):
            row[model] = round(changed_loss - losses[0], 3)
    return rows


DEPTHS, WIDTHS = (2, 4, 8, 16), (32, 64, 128, 256)
WIDTH_OF_DEPTHS, DEPTH_OF_WIDTHS = 64, 2
SHIFTS = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0)
"""Octaves of the learning rate above the default."""

SIZES = {f"{n} layers": partial(gpt, n, WIDTH_OF_DEPTHS) for n in DEPTHS}
SIZES |= {
    f"width {n}": partial(gpt, DEPTH_OF_WIDTHS, n)
    for n in WIDTHS
    if n != WIDTH_OF_DEPTHS
}
"""Name -> what makes the model."""


def sizes(names: Sequence[str], loss: Loss) -> list[Row]:
    """A row for each size: the best rate, and the loss under each."""
    rows: list[Row] = []
    for name in names:
        problem = replace(MODELS["GPT"], build=SIZES[name])
        losses = {}
        for shift in SHIFTS:
            about = {"size": name, "shift": shift}
            losses[f"2^{shift:+.1f}"] = loss(about, problem, changed(lr=2.0**shift))
        best = min(losses, key=lambda shift: losses[shift])
        under = {shift: round(each, 3) for shift, each in losses.items()}
        rows.append({"name": name, "best": best, **under})
    return rows


PARTS: dict[str, tuple[Callable[[Sequence[str], Loss], list[Row]], list[str]]] = {
    "defaults": (defaults, list(MODELS)),
    "sizes": (sizes, list(SIZES)),
}
"""Name of the results -> what measures its rows, and the names that it takes."""

QUESTIONS = {
    "defaults": "held-out loss after {steps} steps of the models of `one_line` with all defaults, "
    "mean of seeds {seeds}, and how far above it each is with one of them changed",
    "sizes": "held-out loss of a unit-scaled GPT after {steps} steps by the learning rate, "
    f"relative to the default of {RATE:g}; mean of seeds {{seeds}}; width {WIDTH_OF_DEPTHS}, or "
    f"{DEPTH_OF_WIDTHS} layers",
}


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    parser = options("rates", __doc__)
    parser.add_argument("part", choices=PARTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    finished = Finished(args.out)

    def loss(about: dict[str, object], problem: Problem, way: Way) -> float:
        about = {**about, "steps": args.steps, "torch": torch.__version__}
        run = partial(held_out, problem, way, steps=args.steps, lr=0.0)
        losses = [
            finished.loss({**about, "seed": seed}, partial(run, seed=seed))
            for seed in map(int, args.seeds.split(","))
        ]
        print(*about.values(), losses, flush=True)
        return statistics.fmean(losses)

    rows_of, names = PARTS[args.part]
    rows = rows_of(args.models.split(";") if args.models else names, loss)
    report(args.part, QUESTIONS[args.part].format(**vars(args)), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
