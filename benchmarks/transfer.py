"""Does the best learning rate of a small model hold for a wider and a deeper one?

``python -m benchmarks.transfer --data FILE`` sweeps the learning rate of a small transformer at
several widths and depths, in plain PyTorch and under u-muP, and by depth under two other rules,
with three seeds, and draws docs/umup.png and docs/umup-depth.png. Run again, it continues with what
is missing in --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Finished, report
from notebooks.nanogpt.data import Corpus, load_corpus
from notebooks.transfer import (
    COMPLETE,
    ENDS,
    Experiment,
    best_rate,
    plot_sweeps,
    search,
    train,
)

FIGURE = Path(__file__).parent.parent / "docs" / "umup.png"
WIDTHS, DEPTHS = (32, 64, 128, 256), (2, 4, 8)
WIDTH, DEPTH = 64, 2  # of the model whose other size is swept
SEEDS = (0, 1, 2)
# where the search of the smallest model begins
START = {"standard": -8, "u-muP": -1, COMPLETE: -1, ENDS: -1}

Losses = dict[int, list[float]]


class Runs:
    """The runs of one experiment: those that are not finished are run when asked for."""

    def __init__(self, path: Path, corpus: Corpus, experiment: Experiment) -> None:
        self.finished, self.corpus, self.experiment = Finished(path), corpus, experiment
        self.shared = dataclasses.asdict(experiment) | {"sha256": corpus.sha256}

    def losses(self, name: str, width: int, layers: int, log_rate: int) -> list[float]:
        """The held-out loss of each seed."""
        return [self._loss(name, width, layers, log_rate, seed) for seed in SEEDS]

    def _loss(
        self, name: str, width: int, layers: int, log_rate: int, seed: int
    ) -> float:
        settings = {"width": width, "layers": layers, "seed": seed}

        def run() -> float:
            data, lr = (self.corpus.train, self.corpus.val), 2.0**log_rate
            loss = train(name, lr=lr, experiment=self.experiment, data=data, **settings)
            print(
                f"{name:16} {width:4} wide {layers} deep 2^{log_rate:<4} {loss:.4f}",
                flush=True,
            )
            return loss

        about = {**self.shared, "name": name, "log_rate": log_rate, **settings}
        return self.finished.loss(about, run)


def sweep(runs: Runs, name: str, width: int, layers: int, start: int) -> Losses:
    """The losses of all seeds at the rates around the best, found from `start` downhill."""
    tried: Losses = {}

    def mean(log_rate: int) -> float:
        tried[log_rate] = runs.losses(name, width, layers, log_rate)
        return statistics.fmean(tried[log_rate])

    search(mean, start)
    return dict(sorted(tried.items()))


def curves(runs: Runs, name: str, kind: str) -> list[dict[str, Any]]:
    """Curves for `plot_sweeps`. Each search begins at the best rate of the size before."""
    sizes = {
        "by width": [(width, DEPTH, f"width {width}") for width in WIDTHS],
        "by depth": [(WIDTH, layers, f"{layers} layers") for layers in DEPTHS],
    }
    result, start = [], START[name]
    for width, layers, label in sizes[kind]:
        losses = sweep(runs, name, width, layers, start)
        start = min(losses, key=lambda k: statistics.fmean(losses[k]))
        size = {"width": width, "layers": layers, "label": label}
        result.append({"parametrisation": name, **size, "losses": losses})
    return result


def rows(kind: str, curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each curve: its best rate, of the mean and of each seed, and the losses."""
    result = []
    for curve in curves:
        losses: Losses = curve["losses"]
        means = {k: statistics.fmean(values) for k, values in losses.items()}
        by_seed = [
            best_rate({k: values[i] for k, values in losses.items()})
            for i in range(len(SEEDS))
        ]
        first = next(
            c for c in curves if c["parametrisation"] == curve["parametrisation"]
        )
        reference = {
            k: statistics.fmean(values) for k, values in first["losses"].items()
        }
        result.append(
            {
                "name": f"{curve['parametrisation']} {kind}",
                "width": curve["width"],
                "layers": curve["layers"],
                "log2_best": round(best_rate(means), 2),
                "moved": round(best_rate(means) - best_rate(reference), 2),
                "log2_best_by_seed": [round(value, 2) for value in by_seed],
                "loss": round(min(means.values()), 4),
                "losses": {f"2^{k}": round(mean, 4) for k, mean in means.items()},
            }
        )
    return result


def begin() -> tuple[Runs, str]:
    """The runs that the command line asks for, and what they have in common, in words."""
    parser = argparse.ArgumentParser(prog="benchmarks.transfer", description=__doc__)
    parser.add_argument(
        "--data", help="text to train on (default: the standard library's source)"
    )
    parser.add_argument("--steps", type=int, default=Experiment(vocab=1).steps)
    parser.add_argument(
        "--out", type=Path, default=Path("out/benchmark-transfer.jsonl")
    )
    args = parser.parse_args()
    # The products are small; runs do not depend on the machine's cores.
    torch.set_num_threads(1)
    corpus = load_corpus(args.data, context=Experiment(vocab=1).context)
    experiment = Experiment(vocab=len(corpus.symbols), steps=args.steps)
    tokens = experiment.batch_size * experiment.context
    about = f"{corpus.name}, {experiment.steps} steps of {tokens} tokens, {len(SEEDS)} seeds"
    return Runs(args.out, corpus, experiment), about


def main() -> int:
    """Trains what is missing, prints the rows, records them and draws the figures."""
    runs, about = begin()
    found = {
        kind: [
            curve
            for name in ("standard", "u-muP")
            for curve in curves(runs, name, kind)
        ]
        for kind in ("by width", "by depth")
    }
    far = "how far does the best learning rate move with"
    listed = [row for kind in found for row in rows(kind, found[kind])]
    report("transfer", f"{far} the size of a model? {about}", listed)
    title = f"Learning rates of a transformer on {runs.corpus.name}, mean of {len(SEEDS)} seeds"
    plot_sweeps(found, title=title).savefig(FIGURE)
    deep = [c for name in (COMPLETE, ENDS) for c in curves(runs, name, "by depth")]
    question = f"{far} depth under other rules? {about}"
    report("transfer_depth", question, rows("by depth", deep))
    usual = [c for c in found["by depth"] if c["parametrisation"] == "u-muP"]
    figure = plot_sweeps({"by depth": [*usual, *deep]}, title=title)
    figure.savefig(FIGURE.with_name("umup-depth.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
