"""What does each default of `unit_scale` and `uu.optim.AdamW` contribute?

``python -m benchmarks.defaults`` trains the models of `benchmarks.one_line` with the defaults and
with one of them changed at a time. Run again, it continues in --out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

import unit_scaling as uu
from benchmarks.common import Finished, Row, report
from benchmarks.one_line import HELD_OUT, MODELS, Way, held_out, mean_loss, parsed
from fp8.lab.preflight.training import Problem
from unit_scaling.optim import LR_MULT, RATES, UMUP, Kind
from unit_scaling.transforms import unit_scale

RATE, MULT = RATES["adam"], LR_MULT["adam"]


@dataclass(frozen=True)
class Change:
    """What differs from the defaults. lr: a factor of the rate. mult: the factors of kinds."""

    lr: float = 1.0
    mult: Mapping[Kind, float] = field(default_factory=dict)

    def way(self) -> Way:
        """unit_scale and AdamW with the change."""

        def make(parameters: Iterator[nn.Parameter], _: float) -> Optimizer:
            return uu.optim.AdamW(parameters, lr=RATE * self.lr, lr_mult=self.mult)

        return Way(unit_scale, make)


CHANGES = {
    "defaults": Change(),
    "lr x1/2": Change(lr=0.5),
    "lr x2": Change(lr=2.0),
    "gains and biases x8": Change(mult={k: 8 * MULT[k] for k in ("norm", "bias")}),
    "gains and biases at lr": Change(mult={"norm": 1.0, "bias": 1.0}),
    "kernels at the rate of matrices": Change(mult={"kernel": 1.0}),
    "readout at the rate of u-muP": Change(mult={"output": 1.0}),
    "u-muP's rates": Change(mult=UMUP),
}
"""Name -> the change; the first is what the others are compared with."""


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    args = parsed("defaults", MODELS, __doc__)
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    finished, losses = Finished(args.out), dict[tuple[str, str], float]()
    for model in args.models.split(";"):
        problem = Problem(MODELS[model], args.steps, HELD_OUT)
        for name, change in CHANGES.items():
            about = {"model": model, "change": name, "steps": args.steps}
            train = partial(held_out, model, problem, change.way(), lr=0.0)
            losses[model, name] = mean_loss(finished, about, seeds, train)
            print(f"{model:16} {name:32} {losses[model, name]:.4f}", flush=True)
    models = args.models.split(";")
    rows: list[Row] = [
        {
            "name": name,
            **{m: round(losses[m, name] - losses[m, "defaults"], 3) for m in models},
        }
        for name in CHANGES
    ]
    rows[0] |= {model: round(losses[model, "defaults"], 3) for model in models}
    question = (
        f"held-out loss after {args.steps} steps of the models of `one_line` with all defaults, "
        f"mean of seeds {args.seeds}, and how far above it each is with one of them changed"
    )
    report("defaults", question, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
