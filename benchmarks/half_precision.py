"""Does float16 train without a scaled loss, and do optimizers with small states train as well?

``python -m benchmarks.half_precision --data FILE`` trains the preset `small` of the nanoGPT demo,
at half its size, once for each row. Run again, it continues with what is missing in --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import torch

from benchmarks.common import Finished, Row, report
from benchmarks.recipe_loss import SIZE
from fp8.adapters import probe
from notebooks.nanogpt.data import Corpus, load_corpus
from notebooks.nanogpt.settings import PRESETS, Settings
from notebooks.nanogpt.train import Training, deterministic
from notebooks.nanogpt.variants import VARIANTS, build_model

#: Name -> variant, optimizer.
RUNS = {
    "fp32": ("fp32", "adamw"),
    "bf16": ("bf16", "adamw"),
    "fp16, loss not scaled": ("fp16", "adamw"),
    "fp16, GradScaler": ("fp16_mixed", "adamw"),
    "unit-scaled fp32": ("unit_scaled", "adamw"),
    "unit-scaled fp16, loss not scaled": ("unit_scaled_fp16", "adamw"),
    "fp32, AdamW e4m3 + float16": ("fp32", "fp8"),
    "fp32, AdamW 8-bit blocks": ("fp32", "8bit"),
    "fp32, bitsandbytes AdamW8bit": ("fp32", "bitsandbytes"),
}


def held_out_loss(variant: str, corpus: Corpus, settings: Settings, seed: int) -> float:
    """The loss after training."""
    how = VARIANTS[variant]
    model = build_model(variant, vocab=len(corpus.symbols), settings=settings, seed=seed)
    training = Training(
        model,
        corpus=corpus,
        settings=settings,
        lr=how.default_lr(settings),
        seed=seed,
        autocast=how.autocast,
        scale_loss=how.scale_loss,
    )
    while not training.finished:
        training.advance()
    return training.evaluate()[1]


def rows(corpus: Corpus, settings: Settings, finished: Finished, seeds: list[int]) -> list[Row]:
    """One for each run that can be made here: its loss for each seed, and the mean gap to fp32."""
    found: list[Row] = []
    for name, (variant, optimizer) in RUNS.items():
        if optimizer == "bitsandbytes" and probe(optimizer).module is None:
            found.append({"name": name, "not_run": "bitsandbytes is not installed"})
            continue
        chosen = dataclasses.replace(settings, optimizer=optimizer)
        losses = []
        for seed in seeds:
            about = {"variant": variant, "seed": seed, "settings": chosen.as_json()}
            about |= {"sha256": corpus.sha256, "torch": torch.__version__}

            def train(variant: str = variant, chosen: Settings = chosen, seed: int = seed) -> float:
                return held_out_loss(variant, corpus, chosen, seed)

            losses.append(round(finished.loss(about, train), 4))
            print(f"{name:36} seed {seed} {losses[-1]:.4f}", flush=True)
        base = found[0]["each"] if found else losses
        gap = math.fsum(a - b for a, b in zip(losses, base, strict=True)) / len(losses)
        mean = math.fsum(losses) / len(losses)
        found.append(
            {"name": name, "val_loss": round(mean, 4), "gap_to_fp32": round(gap, 4), "each": losses}
        )
    return found


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    parser = argparse.ArgumentParser(prog="benchmarks.half_precision", description=__doc__)
    parser.add_argument("--data", help="text to train on (default: the standard library's source)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--iters", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/benchmark-half-precision.jsonl"))
    args = parser.parse_args()
    settings = dataclasses.replace(PRESETS["small"], iters=args.iters, **SIZE)
    corpus = load_corpus(args.data, context=settings.context)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    with deterministic(args.threads):
        found = rows(corpus, settings, Finished(args.out), seeds)
    question = (
        f"held-out loss on {corpus.name} after {args.iters} steps of a GPT with "
        f"{settings.layers} layers, {settings.width} wide"
    )
    report("half_precision", question, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
