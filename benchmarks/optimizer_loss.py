"""What do states, weights and products in few bits cost in held-out loss, under AdamW and Muon?

``python -m benchmarks.optimizer_loss`` trains a plain GPT, half the size of the nanoGPT demo's
preset `small`, with each optimizer and three seeds, all at one learning rate: Muon's updates have
the RMS of AdamW's (``adjust_lr_fn="match_rms_adamw"``). Run again, it continues with what is
missing in --out.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fp8
from benchmarks.common import Row, report
from benchmarks.recipe_loss import Setting, asked
from benchmarks.unit_adamw import row
from fp8.optim import AdamW, Muon, muon_groups
from notebooks.nanogpt.model import GPT
from notebooks.nanogpt.train import Training, deterministic

BLOCKS = {"first_moment": "e4m3_block", "second_moment": "e5m3_block"}
FLOAT32 = {"first_moment": "float32", "second_moment": "float32"}
SAFE = {"ns_coefficients": (2.0, -1.5, 0.5)}
Make = Callable[..., torch.optim.Optimizer]


def adamw(**settings: Any) -> Make:
    """What makes an AdamW of a model."""
    return lambda model, **shared: AdamW(model.parameters(), **shared, **settings)


def muon(**settings: Any) -> Make:
    """What makes a Muon of a model, all its states in float32 unless told."""

    def make(model: nn.Module, **shared: Any) -> torch.optim.Optimizer:
        groups = [group | FLOAT32 | settings for group in muon_groups(model)]
        return Muon(groups, adjust_lr_fn="match_rms_adamw", **shared)

    return make


LOW = {"first_moment": None, "second_moment": "float16"}
RUNS: dict[str, tuple[torch.dtype, Make]] = {
    "AdamW, float32": (torch.float32, adamw(**FLOAT32)),
    "AdamW, e4m3 and float16": (torch.float32, adamw()),
    "AdamW, 8-bit blocks": (torch.float32, adamw(**BLOCKS)),
    "AdamW, bfloat16 weights": (torch.bfloat16, adamw(**FLOAT32)),
    "AdamW, bfloat16 weights, stochastic": (
        torch.bfloat16,
        adamw(**FLOAT32, stochastic_weights=True),
    ),
    "AdamW, bfloat16 weights, error feedback": (
        torch.bfloat16,
        adamw(**FLOAT32, error_feedback=True),
    ),
    "AdamW, bfloat16 weights, error feedback, stochastic": (
        torch.bfloat16,
        adamw(**FLOAT32, error_feedback=True, stochastic_weights=True),
    ),
    "Muon, float32": (torch.float32, muon()),
    "Muon, int8 momentum": (torch.float32, muon(**LOW)),
    "Muon, int8 momentum, (2, -1.5, 0.5)": (torch.float32, muon(**LOW, **SAFE)),
    "Muon, int8 momentum, (2, -1.5, 0.5), mxfp8 products": (
        torch.float32,
        muon(**LOW, **SAFE, recipe="mxfp8"),
    ),
    "Muon, int8 momentum, mxfp8 products": (torch.float32, muon(**LOW, recipe="mxfp8")),
}
"""Name -> the dtype of the model and what makes the optimizer; the first is what the others are
compared with."""


def made(name: str, run: Setting, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    torch.manual_seed(seed)
    dtype, make = RUNS[name]
    model = GPT(run.settings.gpt(len(run.corpus.symbols))).to(dtype)
    shared: Any = {"lr": run.settings.lr, "betas": run.settings.betas, "weight_decay": 0.0}
    return model, make(model, **shared)


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
        question = f"{run.question}, and its gap to AdamW with float32 states, seeds {seeds}"
        report("optimizer_loss", question, rows(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
