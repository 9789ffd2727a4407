"""Does float16 train without a scaled loss, and do optimizers with small states train as well?

``python -m benchmarks.half_precision --data FILE`` trains the preset `small` of the nanoGPT demo,
at half its size, once for each row. Run again, it continues with what is missing in --out.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import torch

from benchmarks.common import Finished, Row, report
from benchmarks.recipe_loss import asked
from fp8.common.libraries import need, probe
from notebooks.nanogpt.data import Corpus
from notebooks.nanogpt.optimizers import OPTIMIZERS, Groups
from notebooks.nanogpt.settings import Settings
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


def _bitsandbytes(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = need("bitsandbytes").optim.AdamW8bit(
        groups, **settings
    )
    return made


OPTIMIZERS["bitsandbytes"] = _bitsandbytes


def held_out_loss(variant: str, corpus: Corpus, settings: Settings, seed: int) -> float:
    """The loss after training."""
    how = VARIANTS[variant]
    model = build_model(
        variant, vocab=len(corpus.symbols), settings=settings, seed=seed
    )
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


def rows(
    corpus: Corpus, settings: Settings, finished: Finished, seeds: list[int]
) -> list[Row]:
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

            def train(
                variant: str = variant, chosen: Settings = chosen, seed: int = seed
            ) -> float:
                return held_out_loss(variant, corpus, chosen, seed)

            losses.append(round(finished.loss(about, train), 4))
            print(f"{name:36} seed {seed} {losses[-1]:.4f}", flush=True)
        base = found[0]["each"] if found else losses
        gap = math.fsum(a - b for a, b in zip(losses, base, strict=True)) / len(losses)
        mean = math.fsum(losses) / len(losses)
        found.append(
            {
                "name": name,
                "val_loss": round(mean, 4),
                "gap_to_fp32": round(gap, 4),
                "each": losses,
            }
        )
    return found


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    run = asked("half_precision", __doc__, 300)
    with deterministic(run.threads):
        found = rows(run.corpus, run.settings, run.finished, run.seeds)
    report("half_precision", run.question, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
