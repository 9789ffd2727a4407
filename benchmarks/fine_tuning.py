"""What does each way to FP8 cost in fine-tuning?

``python -m benchmarks.fine_tuning --data FILE`` trains a small GPT in FP32 on the source of
Python's standard library, then goes on with another text in FP32 and under recipes, all products
cast: from the same weights, on the same batches. Static scales are those of the first step on the
other text. Run again, it continues with what is missing in --out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pydoc_data.topics
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

import fp8
from benchmarks.common import Finished, Row, report
from benchmarks.recipe_loss import Setting, asked, under
from fp8.lab.preflight.findings import Run
from fp8.lab.preflight.paired_runs import REFERENCE, gap
from notebooks.nanogpt.data import Corpus, load_corpus
from notebooks.nanogpt.model import GPT
from notebooks.nanogpt.settings import Settings
from notebooks.nanogpt.train import Training, deterministic

BEFORE, STEPS = 600, 300
SEEDS = "0,1,2"
DOCUMENTATION = pydoc_data.topics.__file__
"""English text that comes with Python: what is trained on without --data."""
WAYS: dict[str, fp8.Recipe | None] = {
    REFERENCE: None,
    **{name: fp8.RECIPES[name] for name in ("static", "tensor", "unit")},
}


def together(first: Corpus, second: Corpus) -> tuple[Corpus, Corpus]:
    """Both texts in one vocabulary."""
    symbols = tuple(sorted({*map(str, first.symbols), *map(str, second.symbols)}))

    def renumbered(corpus: Corpus) -> Corpus:
        ids = torch.tensor([symbols.index(str(symbol)) for symbol in corpus.symbols])
        parts = {"train": ids[corpus.train], "val": ids[corpus.val]}
        return dataclasses.replace(corpus, symbols=symbols, **parts)

    return renumbered(first), renumbered(second)


def trained(model: nn.Module, corpus: Corpus, settings: Settings, seed: int) -> float:
    """The held-out loss after training a model in place."""
    training = Training(
        model, corpus=corpus, settings=settings, lr=settings.lr, seed=seed
    )
    while not training.finished:
        training.advance()
    return training.evaluate()[1]


def runs(
    finished: Finished,
    base: Corpus,
    other: Corpus,
    settings: Settings,
    seeds: Sequence[int],
) -> list[Run]:
    """One run for each way and seed."""
    shared = {
        "settings": settings.as_json(),
        "before": BEFORE,
        "torch": torch.__version__,
    }
    shared |= {"sha256": [base.sha256, other.sha256]}

    @functools.cache
    def pretrained(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = GPT(settings.gpt(len(base.symbols)))
        loss = trained(model, base, dataclasses.replace(settings, iters=BEFORE), seed)
        print(f"seed {seed} {base.name}: {loss:.4f}", flush=True)
        return model

    def tuned(way: str, seed: int) -> Callable[[], float]:
        def train() -> float:
            model, recipe = copy.deepcopy(pretrained(seed)), WAYS[way]
            given = model if recipe is None else under(recipe, model)
            return trained(given, other, settings, seed)

        return train

    found = []
    for seed in seeds:
        for way in WAYS:
            loss = finished.loss({"way": way, "seed": seed, **shared}, tuned(way, seed))
            print(f"seed {seed} {way:10} {loss:.4f}", flush=True)
            found.append(Run(way, seed, [], loss))
    return found


def rows(found: Sequence[Run]) -> list[Row]:
    """One row for each way: its loss, and its gap to FP32 with the same seeds, with a 95 %
    confidence interval."""
    result = []
    for way in WAYS:
        losses = [run.held_out for run in found if run.name == way]
        row: Row = {
            "name": "fp32" if way == REFERENCE else way,
            "held_out_loss": round(statistics.fmean(losses), 4),
            "losses": [round(loss, 4) for loss in losses],
        }
        between = gap(found, way)
        if way != REFERENCE and between is not None:
            ends = {
                "gap": between.mean,
                "gap_low": between.low,
                "gap_high": between.high,
            }
            row |= {name: round(value, 4) for name, value in ends.items()}
        result.append(row)
    return result


def question(run: Setting, base: Corpus) -> str:
    """What the losses are of."""
    return (
        f"{run.question}, trained before for {BEFORE} steps on the {base.name} in FP32; gap to "
        f"FP32 with 95 % intervals, seeds {','.join(map(str, run.seeds))}"
    )


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    run = asked("fine_tuning", __doc__, STEPS, data=DOCUMENTATION, seeds=SEEDS)
    with deterministic(run.threads):
        base, other = together(
            load_corpus(None, context=run.settings.context), run.corpus
        )
        found = runs(run.finished, base, other, run.settings, run.seeds)
        report("fine_tuning", question(run, base), rows(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
