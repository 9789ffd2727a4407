"""What the levels O1, O2 and O3 cost in held-out loss, and what they keep for each weight.

``python -m benchmarks.levels --data FILE`` trains the unit-scaled GPT of the preset `small` under
the recipe "static", with AdamW in FP32 and at each level, with three seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys

import torch
from torch import nn

import fp8
from benchmarks.common import Row, report
from notebooks.nanogpt.data import Corpus, load_corpus
from notebooks.nanogpt.progress import Progress
from notebooks.nanogpt.settings import PRESETS, Settings
from notebooks.nanogpt.train import Training, deterministic, train
from notebooks.nanogpt.variants import VARIANTS, build_model

ITERS = 600  # as benchmarks.training
VARIANT, RECIPE = "unit_scaled", "static"
TARGETS = {"O1": 0.02, "O2": 0.02, "O3": 0.03}
"""What the mean paired difference of held-out losses may be."""
BYTES = {"O1": 11.1, "O2": 6.1, "O3": 7.1}
"""What a level may keep for a covered weight, in bytes; FP32 AdamW keeps 16."""


def run(
    level: str | None, seed: int, corpus: Corpus, settings: Settings
) -> tuple[float, float]:
    """The held-out loss at the end, and the bytes for each covered weight after the last step."""
    torch.compiler.reset()  # torch keeps a few compiled forms of a function only
    model = build_model(
        VARIANT, vocab=len(corpus.symbols), settings=settings, seed=seed
    )
    fp8.convert(model, RECIPE)
    lr = VARIANTS[VARIANT].default_lr(settings)
    training = Training(
        model, corpus=corpus, settings=settings, lr=lr, seed=seed, compile=True
    )
    if level is not None:
        fp8.initialize(model, training.optimizer, level, recipe=None)
    with Progress(f"{level or 'FP32'}, seed {seed}", total=settings.iters) as progress:
        train(training, progress)
    return training.curves["val"][-1], bytes_per_weight(model, training.optimizer)


def bytes_per_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The bytes of a weight with a level, its gradient and its states, as an average."""
    weights = [p for p in model.parameters() if isinstance(p, fp8.ScaledTensor)]
    size = sum(p.nbytes + (0 if p.grad is None else p.grad.nbytes) for p in weights)
    size += sum(x.nbytes for p in weights for x in optimizer.state[p].values())
    return size / max(sum(p.numel() for p in weights), 1)


def main() -> int:
    """Trains, prints the rows and records them."""
    parser = argparse.ArgumentParser(prog="benchmarks.levels", description=__doc__)
    parser.add_argument(
        "--data", help="text to train on (default: the standard library's source)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iters", type=int, default=ITERS)
    args = parser.parse_args()
    settings = dataclasses.replace(PRESETS["small"], iters=args.iters)
    corpus = load_corpus(args.data, context=settings.context)
    with deterministic(threads=1):
        results = {
            level: [run(level, seed, corpus, settings) for seed in range(args.seeds)]
            for level in (None, *fp8.LEVELS)
        }
    reference = [loss for loss, _ in results.pop(None)]
    rows: list[Row] = [
        {"name": "FP32 AdamW", "val_loss": round(statistics.fmean(reference), 4)}
    ]
    rows += [_row(level, results[level], reference) for level in fp8.LEVELS]
    question = (
        f"held-out loss on {corpus.name} after {args.iters} steps of preset small, unit-scaled, "
        f"recipe {RECIPE!r}; gap: the mean of the differences with the same seed"
    )
    report("levels", question, rows)
    return 0


def _row(level: str, runs: list[tuple[float, float]], reference: list[float]) -> Row:
    losses = [loss for loss, _ in runs]
    gaps = [loss - other for loss, other in zip(losses, reference, strict=True)]
    gap, kept = statistics.fmean(gaps), runs[0][1]
    return {
        "name": level,
        "val_loss": round(statistics.fmean(losses), 4),
        "gap": round(gap, 4),
        "gap_std": round(statistics.stdev(gaps), 4) if gaps[1:] else None,
        "gaps": [round(each, 4) for each in gaps],
        "target": TARGETS[level],
        "met": gap <= TARGETS[level],
        "bytes_per_weight": round(kept, 3),
        "allowed": BYTES[level],
        "small_enough": kept <= BYTES[level],
    }


if __name__ == "__main__":
    sys.exit(main())
