"""What does each recipe cost in held-out loss, in a plain and in a unit-scaled GPT?

``python -m benchmarks.recipe_loss --data FILE`` trains the nanoGPT demo's preset `small`, at half
its size, under every recipe with three seeds; all its products are cast. Run again, it continues
with what is missing in --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8
from benchmarks.common import Finished, Row, report
from notebooks.nanogpt.data import Corpus, load_corpus
from notebooks.nanogpt.model import GPT
from notebooks.nanogpt.settings import PRESETS, Settings
from notebooks.nanogpt.train import Training, deterministic
from unit_scaling.transforms import unit_scale

SIZE = {"layers": 2, "heads": 2, "width": 64, "context": 64}
ITERS = 600  # twice the demo's: early in training, seeds differ by more than what is measured
SEEDS = "0,1,2"
MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "unit_scaled": unit_scale,
}


def _saved(name: str) -> fp8.Recipe:
    """The recipe with e4m3 for what activations keep."""
    recipe = fp8.RECIPES[name]
    return dataclasses.replace(recipe, saved_activations=recipe.input)


SAVED = {f"{name}, activations kept in e4m3": _saved(name) for name in ("unit", "tensor")}
RUNS: dict[str, fp8.Recipe | None] = {"fp32": None, **fp8.RECIPES, **SAVED}
"""Name -> the recipe of all products; the first is what the others are compared with."""

Losses = dict[tuple[str, str, int], float]


class UnderRecipe(nn.Module):
    """A model whose every call is one pass under a recipe."""

    def __init__(self, model: nn.Module, recipe: fp8.Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        self.history = fp8.AmaxHistory()  # read by "delayed" alone

    def forward(self, *args: Any) -> Any:
        """The model's, under the recipe."""
        with fp8.autocast(self.recipe, history=self.history):
            return self.model(*args)


def held_out_loss(
    kind: str, recipe: fp8.Recipe | None, corpus: Corpus, settings: Settings, seed: int
) -> float:
    """The loss after training."""
    torch.manual_seed(seed)
    model = MODELS[kind](GPT(settings.gpt(len(corpus.symbols))))
    if recipe is not None:
        model = UnderRecipe(model, recipe)
    lr = settings.lr if kind == "plain" else settings.unit_lr
    training = Training(model, corpus=corpus, settings=settings, lr=lr, seed=seed)
    while not training.finished:
        training.advance()
    return training.evaluate()[1]


def losses(finished: Finished, corpus: Corpus, settings: Settings, seeds: Sequence[int]) -> Losses:
    """(model, run, seed) -> its loss; all of the first seed before any of the second."""
    found: Losses = {}
    shared = {"settings": settings.as_json(), "sha256": corpus.sha256, "torch": torch.__version__}
    for seed, kind, name in itertools.product(seeds, MODELS, RUNS):
        recipe = RUNS[name]
        about = {"model": kind, "recipe": name, "seed": seed, **shared}

        def train(kind: str = kind, recipe: Any = recipe, seed: int = seed) -> float:
            return held_out_loss(kind, recipe, corpus, settings, seed)

        found[kind, name, seed] = finished.loss(about, train)
        print(f"seed {seed} {kind:11} {name:32} {found[kind, name, seed]:.4f}", flush=True)
    return found


def rows(found: Losses) -> list[Row]:
    """One row for each recipe: for each model the loss, and how far it is from the first row's with
    the same seed, mean and standard deviation over the seeds."""
    result, seeds = [], sorted({seed for _, _, seed in found})
    for name in RUNS:
        row: Row = {"name": name}
        for kind in MODELS:
            values = [found[kind, name, seed] for seed in seeds]
            base = [found[kind, next(iter(RUNS)), seed] for seed in seeds]
            gaps = [loss - reference for loss, reference in zip(values, base, strict=True)]
            row[kind] = round(statistics.fmean(values), 4)
            row[f"{kind}_gap"] = round(statistics.fmean(gaps), 4)
            row[f"{kind}_std"] = round(statistics.stdev(gaps), 4) if gaps[1:] else None
        result.append(row)
    return result


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    parser = argparse.ArgumentParser(prog="benchmarks.recipe_loss", description=__doc__)
    parser.add_argument("--data", help="text to train on (default: the standard library's source)")
    parser.add_argument("--seeds", default=SEEDS)
    parser.add_argument("--iters", type=int, default=ITERS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/benchmark-recipe-loss.jsonl"))
    args = parser.parse_args()
    settings = dataclasses.replace(PRESETS["small"], iters=args.iters, **SIZE)
    corpus = load_corpus(args.data, context=settings.context)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    with deterministic(args.threads):
        found = losses(Finished(args.out), corpus, settings, seeds)
        question = (
            f"held-out loss on {corpus.name} after {args.iters} steps of a GPT with "
            f"{settings.layers} layers, {settings.width} wide, and its gap to fp32, "
            f"seeds {args.seeds}"
        )
        report("recipe_loss", question, rows(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
