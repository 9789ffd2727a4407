"""Does a model end where it ends in plain training, by one line and without a learning rate?

``python -m benchmarks.one_line`` trains ten kinds of small models: plain, with torch's AdamW at its
best learning rate, found by a sweep in FP32 with a seed that is not compared; and as
``unit_scale(model)`` with ``uu.optim.AdamW(model.parameters())``, in FP32 and in FP8. "same
function" is the plain model under recipe "static" with its own optimizer and rate, so that FP8 is
the only difference. Held-out losses are compared in pairs, three seeds each. Run again, it
continues in --out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fp8
import unit_scaling as uu
from benchmarks import common, problems
from benchmarks.architectures import VOCABULARY
from benchmarks.common import Finished, Row, report
from benchmarks.nanochat import NanoChat
from benchmarks.problems import PROBLEMS, followed, gratings, masked, zoo
from fp8.lab.preflight.findings import Run
from fp8.lab.preflight.paired_runs import REFERENCE, gap
from fp8.lab.preflight.training import Problem, loss_of, train
from fp8.lab.trace import quiet
from notebooks.nanogpt.model import GPT, GPTConfig
from notebooks.transfer import search
from unit_scaling.transforms import simulate_fp8, unit_scale

NOISE = 2.0
"""Added to the noise of the ResNet's images: otherwise its loss is close to 0."""


def noisy(number: int) -> tuple[Tensor, Tensor]:
    """`gratings` with more noise."""
    images, labels = gratings(number)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(number))
    return images + NOISE * noise, labels


def gpt(layers: int = 4, width: int = 64) -> nn.Module:
    """The demo's GPT, smaller."""
    size = {"layers": layers, "heads": 4, "width": width}
    return GPT(GPTConfig(vocab=VOCABULARY, context=problems.LENGTH, **size))


def _own(name: str, build: Callable[[], nn.Module]) -> problems.Problem:
    return problems.Problem(name, "decoder", "ours", build, followed)


BY_TRAINER = "Llama, Trainer"

MODELS: dict[str, problems.Problem] = {
    "GPT": _own("GPT", gpt),
    BY_TRAINER: replace(
        PROBLEMS["Llama"],
        name=BY_TRAINER,
        build=partial(zoo, "Llama", num_key_value_heads=2),
    ),
    "nanochat": _own("nanochat", NanoChat),
    "ViT": PROBLEMS["ViT"],
    "ResNet": replace(PROBLEMS["residual"], batch=noisy),
    "ConvNeXt": PROBLEMS["ConvNeXt"],
    "LSTM": PROBLEMS["LSTM"],
    "graph network": PROBLEMS["graph network"],
    "diffusion U-Net": PROBLEMS["UNet"],
    "encoder": replace(PROBLEMS["BERT"], batch=partial(masked, rows=32)),
}
"""The GPT has tied embeddings; the Llama has grouped queries and is trained by transformers'
Trainer; the ViT has a class token, the ResNet batch norms, the encoder a loss of masked tokens."""

STEPS, WARMUP, HELD_OUT = 200, 20, 8
SEEDS = (0, 1, 2)
SEED_OF_RATES = 3
START = 4e-3
"""Where the search for the best rate of the plain model begins."""

CLOSE, CLOSE_FP8 = 0.02, 0.01
"""How far the mean loss may be above plain training, and with FP8 above the same without."""

Parameters = Iterator[nn.Parameter]


@dataclass(frozen=True)
class Way:
    """A way to train a model. make: its optimizer, of the parameters and the best rate of the plain
    model. without: the name of the same without FP8."""

    transform: Callable[[nn.Module], nn.Module]
    make: Callable[[Parameters, float], Optimizer]
    without: str = ""


def _torch(parameters: Parameters, lr: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0)


def _ours(parameters: Parameters, lr: float) -> Optimizer:
    return uu.optim.AdamW(parameters)


def _static(model: nn.Module) -> nn.Module:
    return fp8.convert(model, "static", backend="simulate")


PLAIN = Way(lambda model: model, _torch)
WAYS = {
    REFERENCE: PLAIN,
    "FP8, same function": Way(_static, _torch, REFERENCE),
    "unit_scale": Way(unit_scale, _ours),
    "unit_scale, FP8": Way(
        lambda model: simulate_fp8(unit_scale(model)), _ours, "unit_scale"
    ),
}
"""Name -> the way; the first is what the others are compared with."""


def share_of_peak(step: int, steps: int) -> float:
    """The learning rate of a step as a share of the peak: a warmup, then a cosine to 0."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (1 + math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1))) / 2


def held_out(
    model: problems.Problem, way: Way, *, steps: int, seed: int, lr: float
) -> float:
    """The held-out loss after training; infinite if the run diverged."""
    schedules: list[LambdaLR] = []
    problem = Problem(model, steps, HELD_OUT)

    def prepare(plain: nn.Module, _: Optimizer) -> tuple[nn.Module, Optimizer]:
        transformed = way.transform(plain)
        optimizer = way.make(transformed.parameters(), lr)
        share = partial(share_of_peak, steps=steps)
        schedules.append(LambdaLR(optimizer, share))
        return transformed, optimizer

    with quiet():
        if model.name == BY_TRAINER:
            found = held_out_by_trainer(problem, way, seed, lr)
        else:
            step = lambda: schedules[0].step()  # noqa: E731
            found = train(problem, "", seed, prepare, on_step=step)[0].held_out
    return found if math.isfinite(found) else math.inf


def held_out_by_trainer(problem: Problem, way: Way, seed: int, lr: float) -> float:
    """The held-out loss of a model of transformers after training with Trainer's defaults but for
    its schedule. The optimizer is made of a model that has not run, as Trainer's users do."""
    transformers = import_module("transformers")
    start = problem.start(seed)
    model = way.transform(start.model)
    rows = range(len(start.batches[0]["input_ids"]))
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=len(rows),
            max_steps=problem.steps,
            lr_scheduler_type="cosine",
            warmup_steps=WARMUP,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=seed,
        )
        examples = [
            {name: values[i] for name, values in batch.items()}
            for batch in start.batches
            for i in rows
        ]
        optimizers = (way.make(model.parameters(), lr), None)
        trainer: Any = transformers.Trainer(
            model, args, train_dataset=examples, optimizers=optimizers
        )
        trainer.train()
    model.eval()
    losses = [loss_of(model, batch, start.loss).detach() for batch in start.held_out]
    return torch.stack(losses).mean().item()


def measured(
    name: str, finished: Finished, seeds: Sequence[int], steps: int
) -> tuple[float, list[Run]]:
    """The best rate of the plain model, and the runs of all ways and seeds."""

    def loss(way: str, seed: int, lr: float) -> float:
        settings: dict[str, Any] = {"seed": seed, "steps": steps}
        about = {"model": name, "way": way, **settings, "torch": torch.__version__}
        if WAYS[way].make is _torch:
            about["lr"] = lr
        run = lambda: held_out(MODELS[name], WAYS[way], lr=lr, **settings)  # noqa: E731
        found = finished.loss(about, run)
        print(f"{name:16} {way:20} seed {seed} {lr:8.3g} {found:.4f}", flush=True)
        return found

    losses = search(
        lambda octaves: loss(REFERENCE, SEED_OF_RATES, START * 2.0**octaves), 0, sides=1
    )
    rate = START * 2.0 ** min(losses, key=lambda octaves: losses[octaves])
    return rate, [Run(w, seed, [], loss(w, seed, rate)) for seed in seeds for w in WAYS]


def rows(name: str, rate: float, runs: Sequence[Run]) -> list[Row]:
    """One row for each way: its loss, its gap to plain training with the same seeds, and the cost
    of FP8, the gap to the same way without; gaps with a 95 % confidence interval."""
    losses = {way: [run.held_out for run in runs if run.name == way] for way in WAYS}
    result = []
    for way in WAYS:
        plain = way == REFERENCE
        row: Row = {"name": name, "way": "plain AdamW" if plain else way}
        row |= {"lr": rate if WAYS[way].make is _torch else "default"}
        row |= {"held_out_loss": _rounded(statistics.fmean(losses[way]))}
        row |= {"losses": [_rounded(loss) for loss in losses[way]]}
        found = gap(runs, way)
        if not plain and found is not None:
            row |= {"gap": _rounded(found.mean), "gap_low": _rounded(found.low)}
            row |= {"gap_high": _rounded(found.high), "met": found.mean <= CLOSE}
        if other := WAYS[way].without:
            without = [
                replace(run, name=REFERENCE) for run in runs if run.name == other
            ]
            cost = gap([*without, *(run for run in runs if run.name == way)], way)
            if cost is not None:
                row |= {
                    "cost_of_fp8": _rounded(cost.mean),
                    "cost_met": cost.mean <= CLOSE_FP8,
                }
                row |= {
                    "cost_low": _rounded(cost.low),
                    "cost_high": _rounded(cost.high),
                }
        result.append(row)
    return result


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def recorded(benchmark: str) -> dict[str, list[Row]]:
    """The rows of its results by model: rows of models that are not trained again stay."""
    file, found = common.RESULTS / f"{benchmark}.json", dict[str, list[Row]]()
    for row in json.loads(file.read_text())["rows"] if file.exists() else ():
        found.setdefault(row["name"], []).append(row)
    return found


def options(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The command line of this benchmark, and of `benchmarks.rates`."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=doc)
    parser.add_argument("--models", help="names, separated by ; (default: all)")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--steps", type=int, default=STEPS)
    file = Path("out") / f"benchmark-{name.replace('_', '-')}.jsonl"
    parser.add_argument("--out", type=Path, default=file)
    return parser


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    args = options("one_line", __doc__).parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    finished, result = Finished(args.out), recorded("one_line")
    for name in args.models.split(";") if args.models else MODELS:
        result[name] = rows(name, *measured(name, finished, seeds, args.steps))
    question = (
        f"held-out loss after {args.steps} steps, seed by seed from 0, and the gap to plain "
        "training with a 95 % interval. plain AdamW: torch's, at the best of rates a factor of two "
        "apart, found with another seed. unit_scale: with `uu.optim.AdamW(model.parameters())`, "
        f"no other argument; met: the mean gap is at most {CLOSE:g}. FP8: `simulate_fp8` of it; "
        f"cost: the gap to the same without; cost met: at most {CLOSE_FP8:g}. Same function: "
        '`fp8.convert(model, "static")`, and the optimizer and rate of the plain model'
    )
    report(
        "one_line", question, [row for name in MODELS for row in result.get(name, ())]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
