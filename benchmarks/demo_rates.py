"""Which peak learning rate is best for each plain variant of the demo?

``python -m benchmarks.demo_rates`` trains every variant of ``make demo`` but the unit-scaled ones,
which have a default, at the demo's size, under rates a factor of two apart: from the preset's
downhill, until the best one lies between two others.
Run again, it continues with what is missing in --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Finished, Row, report
from notebooks.nanogpt.data import Corpus, load_corpus
from notebooks.nanogpt.settings import PRESETS, Settings
from notebooks.nanogpt.train import Training, deterministic
from notebooks.nanogpt.variants import DEMO, VARIANTS, build_model
from notebooks.transfer import search

SEEDS = (0, 1)


def held_out_loss(
    variant: str, lr: float, corpus: Corpus, settings: Settings, seed: int
) -> float:
    """The loss at the end of training; infinite if training has diverged."""
    model = build_model(
        variant, vocab=len(corpus.symbols), settings=settings, seed=seed
    )
    autocast = VARIANTS[variant].autocast
    given: Any = {"corpus": corpus, "settings": settings, "seed": seed}
    training = Training(model, lr=lr, autocast=autocast, **given)
    while not training.finished:
        training.advance()
    loss = training.evaluate()[1]
    return loss if math.isfinite(loss) else math.inf


def sweep(
    variant: str,
    seeds: tuple[int, ...],
    finished: Finished,
    corpus: Corpus,
    settings: Settings,
) -> dict[float, float]:
    """Learning rate -> mean held-out loss over the seeds."""
    start = VARIANTS[variant].default_lr(settings)
    shared = {
        "settings": settings.as_json(),
        "sha256": corpus.sha256,
        "torch": torch.__version__,
    }

    def loss(k: int) -> float:
        lr = start * 2.0**k
        losses = []
        for seed in seeds:
            about = {"variant": variant, "lr": lr, "seed": seed, **shared}

            def train(seed: int = seed) -> float:
                return held_out_loss(variant, lr, corpus, settings, seed)

            losses.append(finished.loss(about, train))
        mean = statistics.fmean(losses)
        print(f"{variant:16} {lr:8.4g} {mean:.4f} {losses}", flush=True)
        return mean

    return {
        start * 2.0**k: mean for k, mean in sorted(search(loss, 0, sides=1).items())
    }


def row(variant: str, losses: dict[float, float], settings: Settings) -> Row:
    """The rate that the demo takes, the best one, and the loss under each."""
    best = min(losses, key=lambda lr: losses[lr])
    demo = VARIANTS[variant].default_lr(settings)
    under: dict[str, Any] = {f"at {lr:g}": round(losses[lr], 3) for lr in losses}
    return {"name": variant, "demo": demo, "best": best, **under}


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    parser = argparse.ArgumentParser(prog="benchmarks.demo_rates", description=__doc__)
    parser.add_argument(
        "--data", help="text to train on (default: the standard library's source)"
    )
    plain = [name for name in DEMO if not VARIANTS[name].unit_scaled]
    parser.add_argument("--variants", default=",".join(plain))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument(
        "--out", type=Path, default=Path("out/benchmark-demo-rates.jsonl")
    )
    args = parser.parse_args()
    settings = PRESETS["small"]
    settings = dataclasses.replace(settings, eval_interval=settings.iters)
    corpus = load_corpus(args.data, context=settings.context)
    seeds = tuple(map(int, args.seeds.split(",")))
    finished = Finished(args.out)
    with deterministic(threads=1):  # runs do not depend on the machine's cores
        found = {
            variant: sweep(variant, seeds, finished, corpus, settings)
            for variant in args.variants.split(",")
        }
    question = (
        f"held-out loss on {corpus.name} after {settings.iters} steps of preset small by peak "
        f"learning rate; seeds: {', '.join(map(str, seeds))}"
    )
    report("demo_rates", question, [row(name, found[name], settings) for name in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
