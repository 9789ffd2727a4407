"""All variants and seeds of one output folder, with what decides the losses and what was found in
results.json, written after each run. A folder continues after its last finished run."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .data import Corpus
from .gradients import flushed_share
from .plot import plot_runs
from .progress import Progress
from .results import machine, run_result, summary, write, write_json
from .settings import Settings
from .train import Training, deterministic, train
from .variants import VARIANTS, build_model

RESULTS, PLOT = "results.json", "loss.png"
SAMPLE_TEMPERATURE = 0.8  # nanoGPT's


@dataclass(frozen=True, kw_only=True)
class Session:
    """What to train, on what, where to."""

    corpus: Corpus
    settings: Settings
    # The variants, in the order to train them, and the peak of each.
    lr: dict[str, float]
    seeds: tuple[int, ...]
    out: Path
    device: torch.device
    threads: int
    compile: bool = False
    sample: int = 160  # characters to sample from each model at the end

    def identity(self) -> dict[str, Any]:
        """What decides the results to the bit, on one machine, as JSON gives it back."""
        return {
            "settings": self.settings.as_json(),
            "lr": self.lr,
            "seeds": list(self.seeds),
            "data": {
                "name": self.corpus.name,
                "sha256": self.corpus.sha256,
                "vocabulary": len(self.corpus.symbols),
                "train_tokens": len(self.corpus.train),
                "val_tokens": len(self.corpus.val),
            },
            "device": self.device.type,
            "threads": self.threads,
            "compile": self.compile,
            "sample": self.sample,
            "torch": torch.__version__,
        }


def prepare(session: Session, *, resume: bool) -> list[dict[str, Any]]:
    """The finished runs of the folder, rows of its results.json.

    Raises ValueError if the folder holds anything and `resume` is false, if it holds something
    other than a run, or if the run in it has other settings.
    """
    path, out = session.out / RESULTS, session.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder")
    if not path.exists():
        if out.exists() and any(out.iterdir()):
            raise ValueError(
                f"{out} is not empty and holds no run; choose another --out"
            )
        return []
    if not resume:
        raise ValueError(
            f"{out} holds a run already; pass --resume to continue it, or another --out"
        )
    content, now = _read_json(path), session.identity()
    _check_same({key: content.get(key) for key in now}, now, out)
    return content["runs"]


def run(session: Session, finished: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trains what is not finished; the rows of results.json, variant by variant."""
    runs = list(finished)
    done = {(row["variant"], row["seed"]) for row in runs}
    with deterministic(session.threads):
        for variant, seed in itertools.product(session.lr, session.seeds):
            if (variant, seed) not in done:
                runs.append(_train_one(session, variant, seed))
                _write_results(session, runs)
    return runs


def _train_one(session: Session, variant: str, seed: int) -> dict[str, Any]:
    training = _start(session, variant, seed)
    flushed = {"start": _flushed(training, variant)}
    name = variant if len(session.seeds) == 1 else f"{variant} seed {seed}"
    with Progress(name, total=session.settings.iters) as progress:
        train(training, progress)
    flushed["end"] = _flushed(training, variant)
    sample = _sample(training, session)
    return run_result(
        training, variant, lr=session.lr[variant], flushed=flushed, sample=sample
    )


def _flushed(training: Training, variant: str) -> float:
    return flushed_share(training, scaled=VARIANTS[variant].scaled)


def _start(session: Session, variant: str, seed: int) -> Training:
    vocab = len(session.corpus.symbols)
    model = build_model(variant, vocab=vocab, settings=session.settings, seed=seed)
    return Training(
        model.to(session.device),
        corpus=session.corpus,
        settings=session.settings,
        lr=session.lr[variant],
        seed=seed,
        autocast=VARIANTS[variant].autocast,
        scale_loss=VARIANTS[variant].scale_loss,
        compile=session.compile,
    )


def _sample(training: Training, session: Session) -> str:
    """Text from the model, continuing the first character of the held-out text."""
    training.model.eval()
    prompt = session.corpus.val[:1].to(session.device)[None]
    generator = torch.Generator(device=session.device).manual_seed(training.seed)
    tokens = training.model.generate(
        prompt, session.sample, temperature=SAMPLE_TEMPERATURE, generator=generator
    )
    return session.corpus.decode(tokens[0])


def _write_results(session: Session, runs: list[dict[str, Any]]) -> None:
    content = {
        **session.identity(),
        "machine": machine(session.device, session.threads),
        "summary": summary(runs),
        "runs": runs,
    }
    write_json(session.out / RESULTS, content)
    settings = session.settings
    title = (
        f"GPT, {settings.layers} layers, {settings.width} wide, "
        f"{settings.iters} steps on {session.corpus.name}"
    )
    figure = plot_runs(runs, title=title)
    write(session.out / PLOT, lambda file: figure.savefig(file, format="png"))


def _check_same(before: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    """Raises ValueError naming everything that differs, as `settings.iters was 300, is 400`."""
    old, new = _flat(before), _flat(now)
    changed = [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if changed:
        raise ValueError(
            f"cannot resume {out} with other settings: {'; '.join(changed)}"
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat.update(
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {prefix + key: value}
        )
    return flat


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict) or "runs" not in content:
        raise ValueError(f"{path} is damaged: it holds no runs")
    return content
