"""What does each recipe cost in held-out loss, in a small GPT?

``python -m benchmarks.recipe_loss --data FILE`` trains the nanoGPT demo's preset `small`, at half
its size, under every recipe with five seeds; all its products are cast. Finished runs are kept in
--out with the commit that trained them; run again, it continues with what is missing. --train NAME
... trains these recipes alone; --train without a name trains nothing, and records what is there.
--large takes 4 layers, 256 wide, and 2000 steps of half the batch: a run takes about 20 times as
long, so that a part of the recipes and seeds is there. --compile changes the order of sums and no
cast; the file of finished runs says which were compiled. Recipes with the sums of a tensor core are
in benchmarks.sums: they are the operands of others, at ten times the cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import fp8
from benchmarks.common import Finished, Row, report
from fp8.lab.preflight.paired_runs import half_width
from notebooks.nanogpt.data import Corpus, load_corpus
from notebooks.nanogpt.model import GPT
from notebooks.nanogpt.settings import PRESETS, Settings
from notebooks.nanogpt.train import Training, deterministic

SIZE = {"layers": 2, "heads": 2, "width": 64, "context": 64}
LARGE = {
    "layers": 4,
    "heads": 4,
    "width": 256,
    "context": 64,
    "batch_size": 8,
    "iters": 2000,
}
RATES_OF_LARGE = {"lr": 1e-3}
"""The rate of the smaller model over 4, the ratio of the widths: at 4e-3 the loss in float32 ends
at 2.37, not 1.77."""
ITERS = 600  # twice the demo's: early in training, seeds differ by more than what is measured
SEEDS = "0,1,2,3,4"
OWN_SUMS = {name: r for name, r in fp8.RECIPES.items() if r.accumulate is None}
RUNS: dict[str, fp8.Recipe | None] = {"fp32": None, **OWN_SUMS}
"""Name -> the recipe of all products; the first is what the others are compared with."""


def trained(name: str) -> str:
    """The first run with the casts of a run: what is trained for both."""
    same = [
        k
        for k, recipe in RUNS.items()
        if recipe and _unnamed(recipe) == _unnamed(RUNS[name])
    ]
    return same[0] if same else name


def _unnamed(recipe: fp8.Recipe | None) -> fp8.Recipe | None:
    return recipe and dataclasses.replace(recipe, name="")


Losses = dict[tuple[str, int], float]
"""(Run, seed) -> loss."""


class UnderRecipe(nn.Module):
    """A model all of whose products run under a recipe."""

    def __init__(self, model: nn.Module, recipe: fp8.Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, under the recipe."""
        with fp8.autocast(self.recipe):
            return self.model(*args, **kwargs)


def under(recipe: fp8.Recipe, model: nn.Module) -> nn.Module:
    """``model`` under a recipe; under one that keeps scales between passes its layers alone, with
    attention in high precision."""
    return (
        fp8.convert(model, recipe)
        if recipe.keeps_history
        else UnderRecipe(model, recipe)
    )


def held_out_loss(
    recipe: fp8.Recipe | None,
    corpus: Corpus,
    settings: Settings,
    seed: int,
    *,
    compiled: bool = False,
) -> float:
    """The loss after training."""
    torch.manual_seed(seed)
    model: nn.Module = GPT(settings.gpt(len(corpus.symbols)))
    if recipe is not None:
        model = under(recipe, model)
    if compiled:
        torch.compiler.reset()  # each run is compiled anew: no limit on compilations is reached
    given: dict[str, Any] = {"corpus": corpus, "settings": settings, "seed": seed}
    training = Training(model, lr=settings.lr, compile=compiled, **given)
    while not training.finished:
        training.advance()
    return training.evaluate()[1]


class Setting(NamedTuple):
    """What the command line asks for."""

    corpus: Corpus
    settings: Settings
    finished: Finished
    seeds: list[int]
    threads: int
    train: Collection[str]
    suffix: str = ""
    """The end of the name of the results."""
    compiled: bool = False

    @property
    def question(self) -> str:
        """What all its losses are of."""
        return (
            f"held-out loss on {self.corpus.name} after {self.settings.iters} steps of a GPT with "
            f"{self.settings.layers} layers, {self.settings.width} wide"
        )


def losses(setting: Setting) -> Losses:
    """The loss of each run and seed; all of the first seed before any of the second."""
    found: Losses = {}
    corpus, settings, finished = setting.corpus, setting.settings, setting.finished
    shared = {
        "settings": settings.as_json(),
        "sha256": corpus.sha256,
        "torch": torch.__version__,
    }
    for seed, name in itertools.product(setting.seeds, RUNS):
        recipe = RUNS[name]
        about = {"recipe": trained(name), "seed": seed, **shared}
        if name not in setting.train and about not in finished:
            continue

        def train(recipe: Any = recipe, seed: int = seed) -> float:
            return held_out_loss(
                recipe, corpus, settings, seed, compiled=setting.compiled
            )

        found[name, seed] = finished.loss(about, train, compiled=setting.compiled)
        print(f"seed {seed} {name:32} {found[name, seed]:.4f}", flush=True)
    return found


def rows(found: Losses) -> list[Row]:
    """One row for each recipe: the number of seeds, the loss, and how far it is from the first
    row's with the same seed: the mean, and half the width of its 95 % interval (Student's t over
    seeds)."""
    result, base = [], next(iter(RUNS))
    for name in RUNS:
        values = [loss for (run, _), loss in found.items() if run == name]
        gaps = [a - b for a, b in _pairs(found, name, base)]
        if not gaps:
            continue
        row: Row = {"name": name, "seeds": len(gaps)}
        row["loss"] = round(statistics.fmean(values), 4)
        row["gap"] = round(statistics.fmean(gaps), 4)
        row["half"] = round(half_width(gaps), 4) if gaps[1:] else None
        result.append(row)
    return result


def _pairs(found: Losses, run: str, against: str) -> list[tuple[float, float]]:
    """The losses of two runs, for every seed that both have."""
    seeds = sorted({seed for _, seed in found})
    pairs = [(found.get((run, s)), found.get((against, s))) for s in seeds]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def asked() -> Setting:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.recipe_loss", description=__doc__)
    add = parser.add_argument
    add("--data", help="text to train on (default: the standard library's source)")
    add("--seeds", default=SEEDS)
    add("--iters", type=int, default=ITERS)
    add("--threads", type=int, default=1)
    add("--out", type=Path, default=Path("out/benchmark-recipe-loss.jsonl"))
    only = "train these alone; without a name, nothing"
    add("--train", nargs="*", default=list(RUNS), metavar="RECIPE", help=only)
    add("--large", action="store_true", help="the larger GPT")
    add("--compile", action="store_true", help="compile what is trained")
    args = parser.parse_args()
    if unknown := sorted(set(args.train) - set(RUNS)):
        parser.error(f"--train: no recipe {unknown}; allowed: {', '.join(RUNS)}")
    settings = dataclasses.replace(PRESETS["small"], **SIZE, iters=args.iters)
    if args.large:
        settings = dataclasses.replace(PRESETS["small"], **LARGE, **RATES_OF_LARGE)
    return Setting(
        corpus=load_corpus(args.data, context=settings.context),
        settings=settings,
        finished=Finished(args.out),
        seeds=[int(seed) for seed in args.seeds.split(",")],
        threads=args.threads,
        train=args.train,
        suffix="_large" if args.large else "",
        compiled=args.compile,
    )


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    run = asked()
    with deterministic(run.threads):
        found = losses(run)
        seeds = ",".join(map(str, run.seeds))
        report(
            f"recipe_loss{run.suffix}",
            f"{run.question}, and its gap to fp32 ± half its 95 % interval, seeds {seeds}",
            rows(found),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
