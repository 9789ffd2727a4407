"""Does unit-scaled FP8 train as FP32 does, on models other than a GPT?

``python -m benchmarks.kinds_of_models`` trains five kinds of small models in six ways, each with
three seeds, and compares held-out losses in pairs. Run again, it continues in --out.

The optimizer is AdamW: torch's for plain models, and for unit-scaled ones torch's or `uu.optim`'s.
Which one, and the learning rate, is found in FP32 with a seed that is not compared; FP8 has that of
its FP32. "same function" is unit-scaled with ``init="preserve"``: the function, optimizer and rate
of the plain model, so that FP8 is the only difference.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fp8
import unit_scaling as uu
from benchmarks.common import Finished, Row, report
from benchmarks.problems import PROBLEMS, gratings
from fp8.studies.findings import Run
from fp8.studies.proof import REFERENCE, gap
from fp8.studies.training import Problem, train
from fp8.studies.update_error import quiet
from unit_scaling.transforms import simulate_fp8, unit_scale

SLOW = {"norm": 1 / 32, "bias": 1 / 32}  # docs/learning-rates.md says why

NOISE = 2.0
"""Of the ResNet's images, beside what they have: otherwise its loss is close to 0."""


def noisy(number: int) -> tuple[Tensor, Tensor]:
    """`gratings` with more noise."""
    images, labels = gratings(number)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(number))
    return images + NOISE * noise, labels


MODELS = {
    "ResNet": replace(PROBLEMS["residual"], batch=noisy),
    "ViT": PROBLEMS["ViT"],
    "graph network": PROBLEMS["graph network"],
    "LSTM": PROBLEMS["LSTM"],
    "diffusion U-Net": PROBLEMS["UNet"],
}

STEPS, HELD_OUT = 120, 8
SEEDS = (0, 1, 2)
SEED_OF_RATES = 3
WARMUP = 12
BAR = 2.0
"""How many standard errors above FP32 the mean loss may be."""

Parameters = Iterator[nn.Parameter]

PLAIN, UNIT = "plain", "unit-scaled"
"""Kinds of weights, which have learning rates of their own."""


def adamw(parameters: Parameters, lr: float) -> Optimizer:
    """torch's, without weight decay."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0)


def unit_adamw(parameters: Parameters, lr: float) -> Optimizer:
    """With u-muP's rates, as docs/learning-rates.md recommends."""
    return uu.optim.AdamW(parameters, lr=lr, lr_mult=SLOW, weight_decay=0)


OPTIMIZERS = {"torch.optim.AdamW": adamw, "uu.optim.AdamW": unit_adamw}

STARTS = {
    PLAIN: {"torch.optim.AdamW": 4e-3},
    UNIT: {"torch.optim.AdamW": 0.1, "uu.optim.AdamW": 0.5},
}
"""Where the search for the best learning rate begins."""


class Rate(NamedTuple):
    """A key of OPTIMIZERS, and the learning rate."""

    optimizer: str
    lr: float


@dataclass(frozen=True)
class Way:
    """A way to train a model. weights: PLAIN or UNIT. bar: whether its loss is to be within BAR of
    FP32's. without: the name of the same model without FP8, where that is another one."""

    transform: Callable[[nn.Module], nn.Module]
    weights: str = PLAIN
    bar: bool = False
    without: str = ""


FP32 = Way(lambda model: model)
UNIT_FP32 = Way(unit_scale, UNIT)
WAYS = {
    REFERENCE: FP32,
    "FP8 without scales": Way(lambda model: fp8.convert(model, "unit")),
    "FP8, static": Way(lambda model: fp8.convert(model, "static")),
    "FP8, same function": Way(lambda m: simulate_fp8(unit_scale(m, init="preserve")), bar=True),
    "unit-scaled FP32": UNIT_FP32,
    "unit-scaled FP8": Way(
        lambda model: simulate_fp8(unit_scale(model)), UNIT, bar=True, without="unit-scaled FP32"
    ),
}
"""Name -> the way; the first is what the others are compared with."""


def share_of_peak(step: int, steps: int) -> float:
    """The learning rate of a step as a share of the peak: a warmup, then a cosine to 0."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (1 + math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1))) / 2


def held_out(problem: Problem, way: Way, seed: int, rate: Rate) -> float:
    """The held-out loss after training; infinite if the run diverged."""
    schedules: list[LambdaLR] = []

    def prepare(model: nn.Module, _: Optimizer) -> tuple[nn.Module, Optimizer]:
        model = way.transform(model)
        optimizer = OPTIMIZERS[rate.optimizer](model.parameters(), rate.lr)
        schedules.append(LambdaLR(optimizer, lambda step: share_of_peak(step, problem.steps)))
        return model, optimizer

    with quiet():
        run, _ = train(problem, "", seed, prepare, on_step=lambda: schedules[0].step())
    return run.held_out if math.isfinite(run.held_out) else math.inf


def best_rate(loss: Callable[[float], float], start: float) -> tuple[float, float]:
    """The rate, ``start`` times a power of two, whose loss is below that of half and twice it; and
    the loss."""
    tried = {start: loss(start)}
    while True:
        best = min(tried, key=lambda rate: tried[rate])
        new = [rate for rate in (best / 2, best * 2) if rate not in tried]
        if not new:
            return best, tried[best]
        tried |= {rate: loss(rate) for rate in new}


def measured(
    name: str, finished: Finished, seeds: Sequence[int], steps: int
) -> tuple[dict[str, Rate], list[Run]]:
    """The best optimizer and rate for each kind of weights, and the runs of all ways and seeds."""
    problem = Problem(MODELS[name], steps, HELD_OUT)

    def loss(way_name: str, way: Way, seed: int, rate: Rate) -> float:
        about = {"model": name, "way": way_name, "seed": seed, **rate._asdict(), "steps": steps}
        about["torch"] = torch.__version__
        found = finished.loss(about, lambda: held_out(problem, way, seed, rate))
        print(f"{name:16} {way_name:22} seed {seed} {rate} {found:.4f}", flush=True)
        return found

    def best(way_name: str, way: Way) -> Rate:
        found: dict[Rate, float] = {}
        for optimizer, start in STARTS[way.weights].items():

            def of(lr: float, optimizer: str = optimizer) -> float:
                return loss(f"{way_name}, rate", way, SEED_OF_RATES, Rate(optimizer, lr))

            lr, least = best_rate(of, start)
            found[Rate(optimizer, lr)] = least
        return min(found, key=lambda rate: found[rate])

    rates = {PLAIN: best("FP32", FP32), UNIT: best("unit-scaled FP32", UNIT_FP32)}
    runs = [
        Run(way_name, seed, [], loss(way_name, way, seed, rates[way.weights]))
        for seed in seeds
        for way_name, way in WAYS.items()
    ]
    return rates, runs


def rows(name: str, rates: Mapping[str, Rate], runs: Sequence[Run]) -> list[Row]:
    """One row for each way: its loss, and its gap to FP32 with the same seeds, with a 95 %
    confidence interval and whether the mean is within BAR standard errors; the cost of FP8 is the
    gap to the same model without."""
    losses = {way: [run.held_out for run in runs if run.name == way] for way in WAYS}
    result = []
    for way_name, way in WAYS.items():
        each = losses[way_name]
        row: Row = {
            "name": name,
            "way": "FP32" if way is FP32 else way_name,
            **rates[way.weights]._asdict(),
            "held_out_loss": _rounded(statistics.fmean(each)),
            "losses": [_rounded(loss) for loss in each],
        }
        found = gap(runs, way_name)
        if way is not FP32 and found is not None:
            error = standard_error(each, losses[REFERENCE])
            row |= {"gap": _rounded(found.mean), "gap_low": _rounded(found.low)}
            row |= {"gap_high": _rounded(found.high), "standard_error": _rounded(error)}
            if way.bar:
                row["met"] = found.mean <= BAR * error
        if way.without:
            before = losses[way.without]
            row["cost_of_fp8"] = _rounded(statistics.fmean(each) - statistics.fmean(before))
            row["error_of_cost"] = _rounded(standard_error(each, before))
        result.append(row)
    return result


def standard_error(losses: Sequence[float], others: Sequence[float]) -> float:
    """Of the mean of the paired differences; infinite for a single pair."""
    gaps = [a - b for a, b in zip(losses, others, strict=True)]
    return statistics.stdev(gaps) / math.sqrt(len(gaps)) if gaps[1:] else math.inf


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    parser = argparse.ArgumentParser(prog="benchmarks.kinds_of_models", description=__doc__)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("out/benchmark-kinds-of-models.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    finished, result = Finished(args.out), list[Row]()
    for name in MODELS:
        result += rows(name, *measured(name, finished, seeds, args.steps))
    question = (
        f"held-out loss after {args.steps} steps of small models of other kinds, seeds "
        f"{args.seeds}, and the gap to FP32 with a 95 % interval; met: the mean gap is at most "
        f"{BAR:g} standard errors; cost of FP8: the gap to unit-scaled FP32. Optimizer and rate "
        "were found in FP32 with another seed. FP8 without scales and static: of the layers that "
        "`fp8.convert` converts, which leaves `nn.LSTM` and attention as they are; the other FP8: "
        'of all products, but `nn.LSTM` in the same function. Same function: `init="preserve"` of '
        "`unit_scale`"
    )
    report("kinds_of_models", question, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
