"""What do states and weights in few bits cost in held-out loss, under AdamW?

``python -m benchmarks.optimizer_loss`` trains a plain GPT, half the size of the nanoGPT demo's
preset `small`, with each row of RUNS and three seeds, all at one learning rate. Run again, it
continues with what is missing in --out.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

import fp8
from benchmarks.common import Row, report
from benchmarks.recipe_loss import Setting, asked
from fp8.lab.preflight.paired_runs import half_width
from fp8.optim import AdamW
from notebooks.nanogpt.model import GPT
from notebooks.nanogpt.train import Training, deterministic

BLOCKS = {"first_moment": "e4m3_block", "second_moment": "e5m3_block"}
FLOAT32 = {"first_moment": "float32", "second_moment": "float32"}
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "AdamW, float32": (torch.float32, FLOAT32),
    "AdamW, e4m3 and float16": (torch.float32, {}),
    "AdamW, 8-bit blocks": (torch.float32, BLOCKS),
    "AdamW, bfloat16 weights": (torch.bfloat16, FLOAT32),
    "AdamW, bfloat16 weights, stochastic": (
        torch.bfloat16,
        {**FLOAT32, "stochastic_weights": True},
    ),
}
"""Name -> the dtype of the model and the settings of `AdamW`; the first is what the others are
compared with."""


Losses = dict[float, list[float]]
"""Learning rate -> the held-out losses of the seeds."""


def row(name: str, found: Losses, reference: list[float]) -> Row:
    """The best rate, the loss there, and how far it is from the reference with the same seeds: the
    mean, each, and, from three seeds on, the 95 % confidence interval."""
    best = min(found, key=lambda lr: statistics.fmean(found[lr]))
    gaps = [mine - other for mine, other in zip(found[best], reference, strict=True)]
    gap = statistics.fmean(gaps)
    result = {
        "name": name,
        "lr": best,
        "val_loss": round(statistics.fmean(found[best]), 3),
    }
    if found[best] is reference:
        return result
    result |= {"gap": round(gap, 3), "gaps": [round(each, 3) for each in gaps]}
    if len(gaps) > 2:
        half = half_width(gaps)
        result |= {"from": round(gap - half, 3), "to": round(gap + half, 3)}
    return result


def made(name: str, run: Setting, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    torch.manual_seed(seed)
    dtype, settings = RUNS[name]
    model = GPT(run.settings.gpt(len(run.corpus.symbols))).to(dtype)
    shared: Any = {
        "lr": run.settings.lr,
        "betas": run.settings.betas,
        "weight_decay": 0.0,
    }
    return model, AdamW(model.parameters(), **shared, **settings)


def held_out_loss(name: str, run: Setting, seed: int) -> float:
    """The loss after training."""
    model, optimizer = made(name, run, seed)
    given: Any = {"settings": run.settings, "lr": run.settings.lr, "seed": seed}
    training = Training(model, optimizer=optimizer, corpus=run.corpus, **given)
    while not training.finished:
        training.advance()
    return training.evaluate()[1]


def state_bytes(name: str, run: Setting) -> float:
    """For each parameter."""
    model, optimizer = made(name, run, seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    found = fp8.optim.state_bytes(optimizer)
    return (sum(found.values()) - found["weight"] - found["gradient"]) / count


def rows(run: Setting) -> list[Row]:
    """One row for each optimizer, of all seeds."""
    losses: dict[str, list[float]] = {name: [] for name in RUNS}
    shared = {"settings": run.settings.as_json(), "sha256": run.corpus.sha256}
    for seed, name in itertools.product(run.seeds, RUNS):
        about = {"run": name, "seed": seed, "torch": torch.__version__, **shared}
        loss = run.finished.loss(about, partial(held_out_loss, name, run, seed))
        losses[name].append(loss)
        print(f"seed {seed} {name:52} {loss:.4f}", flush=True)
    first = losses[next(iter(RUNS))]
    table = []
    for name, found in losses.items():
        cells = row(name, {run.settings.lr: found}, first)
        table.append(cells | {"state_bytes": round(state_bytes(name, run), 2)})
    return table


def main() -> int:
    """Trains, prints the rows and records them."""
    run = asked("optimizer_loss", __doc__, 200)
    with deterministic(run.threads):
        seeds = ",".join(map(str, run.seeds))
        question = (
            f"{run.question}, and its gap to AdamW with float32 states, seeds {seeds}"
        )
        report("optimizer_loss", question, rows(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
