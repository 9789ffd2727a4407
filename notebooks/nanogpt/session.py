"""All variants and seeds of one output folder: started, continued, never overwritten.

    settings.json            what decides the losses; a run that differs is refused
    checkpoints/V-seedN.pt   variant V, seed N: its state so far and, once finished, its result
    results.json, loss.png   made from the checkpoints, after each variant

The checkpoints are the only truth: whatever moment the process is killed at, a folder continues
from them, and what is finished is not trained again.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .data import Corpus
from .files import BadInputError, load_checkpoint, save_checkpoint, write
from .gradients import flushed_share
from .plot import plot_runs
from .progress import Progress
from .results import machine, run_result, summary, write_json
from .settings import Settings
from .train import Training, deterministic, train
from .variants import VARIANTS, build_model

SETTINGS, RESULTS, PLOT, CHECKPOINTS = "settings.json", "results.json", "loss.png", "checkpoints"
SAMPLE_TEMPERATURE = 0.8  # nanoGPT's


@dataclass(frozen=True, kw_only=True)
class Session:
    """What to train, on what, where to."""

    corpus: Corpus
    settings: Settings
    lr: dict[str, float]  # the variants, in the order to train them, and the peak of each
    seeds: tuple[int, ...]
    out: Path
    device: torch.device
    threads: int
    compile: bool = False
    sample: int = 160  # characters to sample from each model at the end

    def checkpoints(self) -> dict[tuple[str, int], Path]:
        """The file of each variant and seed, in the order of training."""
        return {
            (variant, seed): self.out / CHECKPOINTS / f"{variant}-seed{seed}.pt"
            for variant, seed in itertools.product(self.lr, self.seeds)
        }

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


def prepare(session: Session, *, resume: bool) -> None:
    """Makes the folder, or checks that it is one that `session` may continue.

    Raises ValueError if it holds anything and `resume` is false, if it holds something other
    than a run, or if the run in it has other settings. Writes nothing in those cases.
    """
    path, out = session.out / SETTINGS, session.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder")
    if path.exists():
        if not resume:
            raise ValueError(
                f"{out} holds a run already; pass --resume to continue it, or another --out"
            )
        _check_same(_read_json(path), session.identity(), out)
        return
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no run; choose another --out")
    write_json(path, session.identity())


def run(session: Session) -> list[dict[str, Any]]:
    """Trains what is not trained yet; the rows of results.json, variant by variant."""
    runs = []
    with deterministic(session.threads):
        for (variant, seed), path in session.checkpoints().items():
            runs.append(_train_one(session, variant, seed, path))
            _write_results(session, runs)
    return runs


def _train_one(session: Session, variant: str, seed: int, path: Path) -> dict[str, Any]:
    """The result of one variant and seed, from its checkpoint if that holds it."""
    state = load_checkpoint(path) if path.exists() else {}
    if "result" in state:
        return json.loads(state["result"])
    training = _start(session, variant, seed)
    flushed = _restore(training, state, path) if state else {"start": _flushed(training, variant)}
    name = variant if len(session.seeds) == 1 else f"{variant} seed {seed}"
    with Progress(name, start=training.step, total=session.settings.iters) as progress:
        train(
            training,
            progress,
            save=lambda: save_checkpoint({**training.state_dict(), "flushed": flushed}, path),
        )
    flushed["end"] = _flushed(training, variant)
    result = run_result(
        training,
        variant,
        lr=session.lr[variant],
        flushed=flushed,
        sample=_sample(training, session),
    )
    save_checkpoint({**training.state_dict(), "result": json.dumps(result)}, path)
    return result


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


def _restore(training: Training, state: dict[str, Any], path: Path) -> dict[str, float]:
    """Puts `state` into `training`; the shares of flushed gradients measured so far."""
    try:
        training.load_state_dict(state)
        return dict(state["flushed"])
    except (ValueError, KeyError) as error:
        raise BadInputError(f"{path}: {error}") from error


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
        raise ValueError(f"cannot resume {out} with other settings: {'; '.join(changed)}")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat.update(
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no settings")
    return content
