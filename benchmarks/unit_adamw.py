"""Which of u-muP's rules costs a unit-scaled model its loss under `uu.optim.AdamW`?

``python -m benchmarks.unit_adamw`` trains a unit-scaled GPT, half the size of the demo's, with
torch's AdamW, with `uu.optim.AdamW`, and with one difference between the two taken away or brought
in at a time; each at its best learning rate of several a factor of two apart. Run again, it
continues with what is missing in --out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unit_scaling as uu
from benchmarks.common import Finished, Row, report
from fp8.studies.proof import half_width
from notebooks.nanogpt.data import Corpus, load_corpus
from notebooks.nanogpt.settings import Settings
from notebooks.nanogpt.train import Training, deterministic
from notebooks.nanogpt.variants import build_model
from notebooks.transfer import search

SIZE: dict[str, Any] = {"layers": 2, "heads": 2, "width": 64, "context": 64, "batch_size": 8}
SETTINGS = Settings(**SIZE, iters=300, eval_interval=300, eval_batches=40)
SEEDS = "0,1"

#: Which parameters a factor is for.
KINDS: dict[str, Callable[[str, nn.Parameter], bool]] = {
    "gains": lambda name, p: p.dim() < 2,
    "embedding": lambda name, p: name.startswith("tokens"),  # and readout: they share a weight
    "positions": lambda name, p: name.startswith("positions"),
    "down": lambda name, p: name.endswith("down.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """An optimizer: torch's AdamW or `uu.optim.AdamW`, its rates by kind times `factors`.

    decay: its weight_decay on matrices. independent: whether that is the decay of a step.
    """

    umup: bool
    start: float
    factors: Mapping[str, float] = field(default_factory=dict)
    decay: float = 0.0
    independent: bool = True

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """For these parameters, at this rate."""
        groups = []
        for name, p in model.named_parameters():
            factor = math.prod(self.factors.get(k, 1.0) for k in KINDS if KINDS[k](name, p))
            decay = self.decay if p.dim() >= 2 else 0.0
            groups.append({"params": [p], "lr": factor * lr, "weight_decay": decay})
        if not self.umup:
            return torch.optim.AdamW(groups, lr, SETTINGS.betas)
        independent = self.independent
        return uu.optim.AdamW(groups, lr, SETTINGS.betas, independent_weight_decay=independent)


TORCH, UU = {"umup": False, "start": 2**-3}, {"umup": True, "start": 0.5}
RUNS: dict[str, Run] = {
    "torch.optim.AdamW": Run(**TORCH),
    "its gains x8": Run(**TORCH, factors={"gains": 8}),
    "its weight_decay 0.1": Run(**TORCH, decay=0.1),
    "uu.optim.AdamW": Run(**UU),
    "embedding and readout x2": Run(**UU, factors={"embedding": 2}),
    "embedding and readout x1/2": Run(**UU, factors={"embedding": 0.5}),
    "positions x4": Run(**UU, factors={"positions": 4}),
    "second layers of the MLPs x2": Run(**UU, factors={"down": 2}),
    "gains x1/8": Run(**UU, factors={"gains": 1 / 8}),
    "gains x1/32": Run(**UU, factors={"gains": 1 / 32}),
    "gains not trained": Run(**UU, factors={"gains": 0}),
    "weight_decay 0.1": Run(**UU, decay=0.1),
    "weight_decay 0.008": Run(**UU, decay=0.008),
    "weight_decay 0.1, not independent": Run(**UU, decay=0.1, independent=False),
}
"""The first is what the others are compared with."""

Losses = dict[float, list[float]]


def held_out_loss(run: Run, lr: float, corpus: Corpus, seed: int) -> float:
    """The loss at the end of training; infinite if training has diverged."""
    model = build_model("unit_scaled", vocab=len(corpus.symbols), settings=SETTINGS, seed=seed)
    training = Training(
        model,
        corpus=corpus,
        settings=SETTINGS,
        lr=lr,
        seed=seed,
        optimizer=run.optimizer(model, lr),
    )
    while not training.finished:
        training.advance()
    loss = training.evaluate()[1]
    return loss if math.isfinite(loss) else math.inf


def sweep(name: str, seeds: tuple[int, ...], finished: Finished, corpus: Corpus) -> Losses:
    """Learning rate -> the held-out losses of the seeds."""
    found: Losses = {}
    shared = {"settings": SETTINGS.as_json(), "sha256": corpus.sha256, "torch": torch.__version__}

    def losses(lr: float) -> list[float]:
        result = []
        for seed in seeds:

            def train(seed: int = seed) -> float:
                return held_out_loss(RUNS[name], lr, corpus, seed)

            result.append(finished.loss({"run": name, "lr": lr, "seed": seed, **shared}, train))
        print(f"{name:34} {lr:6.4g} {statistics.fmean(result):.4f}", flush=True)
        return result

    def mean(k: int) -> float:
        lr = RUNS[name].start * 2.0**k
        found[lr] = losses(lr)
        return statistics.fmean(found[lr])

    search(mean, 0, sides=1)
    return found


def row(name: str, found: Losses, reference: list[float]) -> Row:
    """The best rate, the loss there, and how far it is from the reference with the same seeds: the
    mean, each, and, from three seeds on, the 95 % confidence interval."""
    best = min(found, key=lambda lr: statistics.fmean(found[lr]))
    gaps = [mine - other for mine, other in zip(found[best], reference, strict=True)]
    gap = statistics.fmean(gaps)
    result = {"name": name, "lr": best, "val_loss": round(statistics.fmean(found[best]), 3)}
    if found[best] is reference:
        return result
    result |= {"gap": round(gap, 3), "gaps": [round(each, 3) for each in gaps]}
    if len(gaps) > 2:
        half = half_width(gaps)
        result |= {"from": round(gap - half, 3), "to": round(gap + half, 3)}
    return result


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    parser = argparse.ArgumentParser(prog="benchmarks.unit_adamw", description=__doc__)
    parser.add_argument("--data", help="text to train on (default: the standard library's source)")
    parser.add_argument("--seeds", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("out/benchmark-unit-adamw.jsonl"))
    args = parser.parse_args()
    corpus = load_corpus(args.data, context=SETTINGS.context)
    finished, seeds = Finished(args.out), tuple(map(int, args.seeds.split(",")))
    with deterministic(threads=1):
        found = {name: sweep(name, seeds, finished, corpus) for name in RUNS}
    first = found[next(iter(RUNS))]
    reference = min(first.values(), key=statistics.fmean)
    question = (
        f"held-out loss of a unit-scaled GPT (width {SETTINGS.width}, {SETTINGS.layers} layers) on "
        f"{corpus.name} after {SETTINGS.iters} steps, at the best of rates a factor of two apart, "
        f"{len(seeds)} seeds; gap to the first row with the same seed"
    )
    report("unit_adamw", question, [row(name, found[name], reference) for name in RUNS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
