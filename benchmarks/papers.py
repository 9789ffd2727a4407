"""Do the claims of papers about training runs hold in a small GPT?

``python -m benchmarks.papers [--seeds N]`` trains the GPT of ``fp8 preflight --demo`` for 150 steps
of 256 tokens in float32 and under each row of RUNS, with the same weights, batches and random
numbers. The gap of a run is the mean difference of training losses over the last third of the
steps, as in `fp8.preflight`. Finished runs stay in --out; run again, it continues with what is
missing. --record trains nothing, and records what is there.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import fp8
from benchmarks.common import Row, report
from fp8.lab.preflight.demo import CONTEXT, GPT, SOURCES, text_batches
from fp8.lab.preflight.findings import Run
from fp8.lab.preflight.paired_runs import REFERENCE, TAIL, end_difference, half_width
from fp8.lab.preflight.training import Prepare, Problem, Setup, train, under
from fp8.lab.trace import quiet

STEPS, HELD_OUT, BATCH = 150, 8, 4
OUT = Path("out/benchmark-papers.jsonl")
SWITCH = 1 - TAIL
"""Runs that switch do so before the steps whose losses are compared."""


def forward_only(recipe: fp8.Recipe) -> fp8.Recipe:
    """The recipe with both gradients in high precision."""
    casts = dict.fromkeys(
        ["grad", "grad_input_weight", "grad_weight_grad", "grad_weight_input"]
    )
    return replace(recipe, name=f"{recipe.name}, forward", **casts)


def backward_only(recipe: fp8.Recipe) -> fp8.Recipe:
    """The recipe with the output in high precision."""
    return replace(
        recipe,
        name=f"{recipe.name}, backward",
        input=None,
        weight=None,
        grad_input_weight=recipe.grad_input[1],
        grad_weight_grad=recipe.grad_weight[0],
        grad_weight_input=recipe.grad_weight[1],
    )


def _of_format(name: str) -> fp8.Recipe:
    """The format for all operands, a scale for each block of 128 along the sum."""
    cast = fp8.Cast(format=name, scaling="block")
    return fp8.Recipe(name=name, input=cast, weight=cast, grad=cast)


NVIDIA, QUARTET2 = fp8.RECIPES["nvfp4_nvidia"], fp8.RECIPES["quartet2"]
_RECIPES = [
    *(
        forward_only(QUARTET2),
        backward_only(QUARTET2),
        QUARTET2,
        fp8.RECIPES["tetrajet2"],
    ),
    *map(_of_format, ("e4m3", "e2m1", "e5m2", "e2m3", "e3m2")),
]
LATE_FORWARD, LATE_BACKWARD = (
    "forward late in high precision",
    "backward late in high precision",
)
RUNS: dict[str, fp8.Policy] = {
    **{
        r.name: fp8.Policy(r)
        for r in (NVIDIA, forward_only(NVIDIA), backward_only(NVIDIA))
    },
    LATE_FORWARD: fp8.Policy(NVIDIA, switch=[(SWITCH, backward_only(NVIDIA))]),
    LATE_BACKWARD: fp8.Policy(NVIDIA, switch=[(SWITCH, forward_only(NVIDIA))]),
    **{recipe.name: fp8.Policy(recipe) for recipe in _RECIPES},
}
"""Name -> the policy of all layers."""


class Claim(NamedTuple):
    """The gap of ``larger`` exceeds that of ``smaller``; published: in the paper, by this
    factor."""

    source: str
    larger: str
    smaller: str
    published: float


QUARTET = "Quartet II, for_plots/runs.json"
FITTED = "arXiv:2501.02423, table 2"
APPENDIX = "NVFP4 (arXiv:2509.25149), appendix D"
CLAIMS = (
    Claim(QUARTET, "nvfp4_nvidia", "tetrajet2", 0.055 / 0.054),
    Claim(QUARTET, "tetrajet2", "quartet2", 0.054 / 0.042),
    Claim(QUARTET, "nvfp4_nvidia, forward", "quartet2, forward", 0.054 / 0.038),
    Claim(QUARTET, "nvfp4_nvidia, backward", "quartet2, backward", 0.015 / 0.0065),
    Claim(QUARTET, "nvfp4_nvidia, forward", "nvfp4_nvidia, backward", 0.054 / 0.015),
    Claim(QUARTET, "quartet2, forward", "quartet2, backward", 0.038 / 0.0065),
    Claim(FITTED, "e5m2", "e4m3", 1.42),
    Claim(FITTED, "e2m3", "e3m2", 1.08),
    Claim(FITTED, "e2m1", "e4m3", 80.0),
    Claim(APPENDIX, "nvfp4_nvidia", LATE_FORWARD, 1.5 / 0.5),
    Claim(APPENDIX, "nvfp4_nvidia", LATE_BACKWARD, 1.0),
)
"""The orders and ratios that the papers state."""


def setup(seed: int) -> Setup:
    """The model and batches of a seed."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    text = "".join(inspect.getsource(import_module(name)) for name in SOURCES).encode()
    batches = text_batches(text, BATCH, CONTEXT, STEPS + HELD_OUT, seed)
    return Setup(model, batches, optimizer=optimizer)


def trained(problem: Problem, name: str, seed: int) -> Run:
    """A run; of a policy with a switch, which `fp8.advance` makes."""
    policy, models = RUNS.get(name), list[nn.Module]()
    done = 0

    def prepare(model: nn.Module, optimizer: Any) -> Any:
        assert policy is not None
        prepared = under(policy)(model, optimizer)
        models.append(prepared[0])
        return prepared

    def advance() -> None:
        nonlocal done
        done += 1
        if policy is not None and policy.switch:
            fp8.advance(models[0], done / problem.steps)

    chosen: Prepare | None = None if policy is None else prepare
    with quiet():
        return train(problem, name, seed, chosen, on_step=advance)[0]


def finished(path: Path) -> list[Run]:
    """The runs in a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Run(**json.loads(line)) for line in lines]


def train_missing(path: Path, seeds: int) -> None:
    """Trains all runs of so many seeds that the file does not have, and adds them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(run.name, run.seed) for run in finished(path)}
    problem = Problem(setup, STEPS, HELD_OUT)
    for name in (REFERENCE, *RUNS):
        for seed in range(seeds):
            if (name, seed) not in done:
                run = trained(problem, name, seed)
                with path.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")


Gaps = dict[int, float]
"""Seed -> the gap; Inf for a run that diverges."""


def gaps(runs: Sequence[Run], name: str) -> Gaps:
    """The gaps of a name."""
    references = {run.seed: run for run in runs if run.name == REFERENCE}
    return {
        run.seed: end_difference(run, references[run.seed])
        if math.isfinite(run.held_out)
        else math.inf
        for run in runs
        if run.name == name and run.seed in references
    }


def run_row(name: str, measured: Gaps) -> Row:
    """The gap of a run, with half its 95 % interval."""
    values = list(measured.values())
    mean, half = statistics.fmean(values), half_width(values)
    return {
        "name": name,
        "gap": round(mean, 4),
        "half": round(half, 4),
        "seeds": len(values),
    }


def claim_row(claim: Claim, larger: Gaps, smaller: Gaps) -> Row:
    """The ratio of the gaps, where both are known to be above 0, and whether their difference,
    paired by seed, shows the order of the paper."""
    seeds = larger.keys() & smaller.keys()
    differences = [larger[seed] - smaller[seed] for seed in seeds]
    difference, half = statistics.fmean(differences), half_width(differences)
    known = all(
        row["gap"] > row["half"] for row in (run_row("", larger), run_row("", smaller))
    )
    order = (
        "seen"
        if difference > half
        else "opposite"
        if difference < -half
        else "not seen"
    )
    if claim.published == 1.0:
        order = "seen" if abs(difference) <= half else "opposite"
    shown = statistics.fmean(larger.values()) / statistics.fmean(smaller.values())
    sign = "=" if claim.published == 1.0 else ">"
    return {
        "name": f"{claim.larger} {sign} {claim.smaller}",
        "source": claim.source,
        "published_ratio": round(claim.published, 2),
        **({"ratio": round(shown, 2)} if known else {}),
        "difference": round(difference, 4),
        "half": round(half, 4),
        "seeds": len(seeds),
        "order": order,
    }


def rows(runs: Sequence[Run]) -> list[Row]:
    """Of all runs and claims with at least two seeds."""
    measured = {name: each for name in RUNS if len(each := gaps(runs, name)) > 1}
    claims = [c for c in CLAIMS if {c.larger, c.smaller} <= measured.keys()]
    return [run_row(name, each) for name, each in measured.items()] + [
        claim_row(claim, measured[claim.larger], measured[claim.smaller])
        for claim in claims
    ]


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.record:
        train_missing(arguments.out, arguments.seeds)
    report(
        "papers",
        f"the GPT of fp8 preflight --demo, {STEPS} steps of {BATCH * CONTEXT} tokens: the training "
        "loss of the last third of the steps minus that in float32, with the same weights and "
        "batches, ± half its 95 % interval over seeds; ratio: of two gaps, where both are "
        "known to be above 0; order: by their difference, paired by seed",
        rows(finished(arguments.out)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
