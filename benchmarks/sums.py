"""What the sums of tensor cores cost: in error, in training, and in the time of simulation.

``python -m benchmarks.sums [error] [training] [time]`` measures the parts named, or all.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import Row, compare, fix_allocator, report, show
from benchmarks.problems import PROBLEMS
from fp8 import RECIPES, Cast, Policy, Recipe
from fp8.lab.preflight.paired_runs import REFERENCE, gap
from fp8.lab.preflight.training import Problem, loss_of, train, under
from fp8.lab.sums import dot
from fp8.products.matmul import linear

ROWS = 64
LENGTHS = (128, 1024, 4096, 16384)
SIZE = 512
TARGET = 60.0  # times a product in float32
STEPS, HELD_OUT, SEEDS = 200, 8, range(5)
MODEL = "GPT-2"

SUMS: dict[str, tuple[str, int]] = {
    "Ada": ("ada", 0),
    "Hopper": ("hopper", 0),
    "Hopper, promoted every 128": ("hopper", 128),
}
"""Name -> `Recipe.accumulate` and `Recipe.promote`."""

QUESTION = f"""\
sums of tensor cores (`Recipe.accumulate`). error: relative error of a product of {ROWS} x K by K x
{ROWS} against exact sums of the same FP8 operands (measured: inputs after a GELU and gradients of
{MODEL} after {STEPS} steps, summed over tokens); shrinkage: 1 - <y, exact> / <exact, exact>.
gap: held-out loss of {MODEL} (benchmarks.preflight) after {STEPS} steps minus that in float32, with
the 95 % interval over {len(SEEDS)} paired seeds. ratio: processor time of a simulated product of
{SIZE}^3, compiled, one thread, to the product in float32"""


def recipe(chip: str, promote: int, format: str = "e4m3") -> Recipe:
    """All operands in a format, with one scale each, under the sums of a chip."""
    cast = Cast(format=format, scaling="tensor")
    return Recipe(
        name=chip, input=cast, weight=cast, grad=cast, accumulate=chip, promote=promote
    )


@functools.cache
def measured() -> tuple[Tensor, Tensor]:
    """The operands of the gradient of a weight in a trained model, features x tokens: what the last
    layer behind a GELU reads, and the gradient of its output."""
    problem = Problem(PROBLEMS[MODEL], STEPS, HELD_OUT)
    start, seen = problem.start(0), dict[str, list[Tensor]](input=[], grad=[])
    for batch in start.batches:
        start.optimizer.zero_grad()
        loss_of(start.model, batch, start.loss).backward()
        start.optimizer.step()
    layer = start.model.get_submodule("transformer.h")[-1].mlp.c_proj
    layer.register_forward_pre_hook(
        lambda _, args: seen["input"].append(args[0].detach())
    )
    layer.register_full_backward_hook(lambda *given: seen["grad"].append(given[2][0]))
    for batch in itertools.cycle(start.batches):
        loss_of(start.model, batch, start.loss).backward()
        x, g = (
            torch.cat([t.flatten(0, -2) for t in found]).T for found in seen.values()
        )
        if x.shape[1] >= LENGTHS[-1]:
            return x[:ROWS], g[:ROWS]
    raise AssertionError


def operands(kind: str, k: int) -> tuple[Tensor, Tensor]:
    """Rows of numbers. "normal": independent; "positive": as activations after a ReLU; "measured":
    of `measured`."""
    if kind == "measured":
        x, g = measured()
        return x[:, :k].contiguous(), g[:, :k].contiguous()
    generator = torch.Generator().manual_seed(k)
    x, w = (torch.randn(ROWS, k, generator=generator) for _ in range(2))
    return (x.relu(), w.abs()) if kind == "positive" else (x, w)


def error_rows() -> Iterator[Row]:
    """Error and shrinkage by the length of a sum, for each chip, kind of operand and format."""
    for name, (chip, promote) in SUMS.items():
        for format in ("e4m3", "e5m2"):
            for kind in ("normal", "positive", "measured"):
                row: Row = {"name": name, "format": format, "operands": kind}
                for k in LENGTHS:
                    found, exact = _both(
                        recipe(chip, promote, format), *operands(kind, k)
                    )
                    row[f"error_{k}"] = _short((found - exact).norm() / exact.norm())
                    row[f"shrinkage_{k}"] = _short(
                        1 - (found * exact).sum() / exact.square().sum()
                    )
                yield row


def _both(summed: Recipe, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The product with the sums of the recipe, and with exact ones, float64."""
    exact = dataclasses.replace(summed, accumulate=None, promote=0)
    found = linear(x, w, recipe=summed).double()
    return found, linear(x.double(), w.double(), recipe=exact)


def _short(value: Tensor) -> str:
    return f"{float(value):.1e}"


def training_rows() -> Iterator[Row]:
    """The gaps of recipe "tensor" with torch's sums and with Hopper's."""
    problem = Problem(PROBLEMS[MODEL], STEPS, HELD_OUT)
    tensor = RECIPES["tensor"]
    recipes = {
        "tensor": tensor,
        "tensor, Hopper's sums": dataclasses.replace(tensor, accumulate="hopper"),
        "tensor, Hopper's sums, promoted every 128": dataclasses.replace(
            tensor, accumulate="hopper", promote=128
        ),
    }
    runs = []
    for seed in SEEDS:
        runs.append(train(problem, REFERENCE, seed)[0])
        for name, each in recipes.items():
            runs.append(train(problem, name, seed, under(Policy(each)))[0])
    for name in recipes:
        found = gap(runs, name)
        assert found is not None
        mean, low, high = (f"{value:+.4f}" for value in found[:3])
        yield {"name": name, "gap": f"{mean} ({low} to {high})", "seeds": found.seeds}


def time_rows() -> list[Row]:
    """The time of a product relative to float32, compiled."""
    dot.EAGER = 0
    torch.manual_seed(0)
    x, w = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    candidates = {
        name: partial(linear, x, w, recipe=recipe(chip, promote))
        for name, (chip, promote) in SUMS.items()
    }
    torch.set_num_threads(1)
    rows = compare(lambda: x @ w.mT, candidates, rounds=9, clock=time.process_time)
    return [row | {"target": TARGET, "met": row["ratio"] <= TARGET} for row in rows]


PARTS: dict[str, Callable[[], Iterator[Row] | list[Row]]] = {
    "error": error_rows,
    "training": training_rows,
    "time": time_rows,
}


def main() -> int:
    """Measures and prints the rows; records them if all parts are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    asked = parser.parse_args().parts
    warnings.simplefilter("ignore")
    rows = [row for part in asked or PARTS for row in PARTS[part]()]
    (show if asked else report)("sums", " ".join(QUESTION.split()), rows)
    return 0


if __name__ == "__main__":
    fix_allocator("benchmarks.sums")
    sys.exit(main())
