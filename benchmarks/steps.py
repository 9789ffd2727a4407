"""What a training step of a small GPT costs: under recipes, after transforms, with statistics.

python -m benchmarks.steps recipes|transforms|stats [RECIPE ...]

Processor time of one thread, so that other load on the machine does not count. Each step stands
beside a plain one, and is compiled anew: torch keeps a few compiled forms of a function only.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import fp8
from benchmarks.common import Row, compare, fix_allocator, report, show
from notebooks.nanogpt.model import GPT, GPTConfig
from unit_scaling.transforms import simulate_fp8, unit_scale

Step = Callable[[], object]

COMPILERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "compiled": torch.compile,
}


def gpt() -> nn.Module:
    """4 layers, 128 wide, with the same weights each time."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=65, context=128, layers=4, heads=4, width=128))


def batch() -> tuple[Tensor, Tensor]:
    """16 x 128 tokens, and the next ones."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 65, (16, 129), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def training_step(
    model: nn.Module,
    call: Callable[..., Any],
    *,
    inside: AbstractContextManager[Any] | None = None,
    after: Callable[[Tensor], object] = lambda loss: None,
) -> Step:
    """Forward, backward and an AdamW step. call: the model, or what it runs in."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = batch()

    def step() -> None:
        with inside or nullcontext():
            _, loss = call(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after(loss)

    return step


def beside(plain: Step, steps: dict[str, Step], rounds: int = 20) -> list[Row]:
    """The rows of `compare`, in time of the processor."""
    return compare(plain, steps, rounds=rounds, clock=time.process_time)


def judged(row: Row, target: float | None, value: float) -> Row:
    """The row with its target, and whether the value meets it."""
    met = None if target is None else value <= target
    return {**row, "target": target, "met": met}


# Recipes

TARGETS = {
    "unit": 1.15,
    "static": 1.16,
    "tensor": 1.3,
    "row": 1.5,
    "block": 1.5,
    "mxfp8": 1.8,
    "nvfp4": 3.0,
}
"""What a step may cost, in fp32 steps."""


def under_recipe(recipe: str | None) -> Step:
    """A compiled step. Recipes that keep scales run in converted layers."""
    model = gpt()
    keeps = recipe is not None and fp8.RECIPES[recipe].keeps_history
    if recipe is not None and keeps:
        fp8.convert(model, recipe, backend="simulate")
    if recipe == "static":
        fp8.calibrate(model, batch())

    def forward(x: Tensor, y: Tensor) -> Any:
        if recipe is None or keeps:
            return model(x, y)
        with fp8.autocast(recipe):
            return model(x, y)

    return training_step(model, torch.compile(forward, fullgraph=True))


def recipes(names: Sequence[str]) -> Iterator[Row]:
    for name in names or fp8.RECIPES:
        torch.compiler.reset()
        (row,) = beside(under_recipe(None), {name: under_recipe(name)})
        yield judged(row, TARGETS.get(name), row["ratio"])


# Transforms

VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "unit_scale": unit_scale,
    "simulate_fp8": simulate_fp8,
    "simulate_fp8(unit_scale)": lambda model: simulate_fp8(unit_scale(model)),
}


def transformed(build: Callable[[nn.Module], nn.Module], compiled: bool) -> Step:
    model = build(gpt())
    model(*batch())[1].backward()  # sets values, and static scales
    model.zero_grad(set_to_none=True)
    run = torch.compile(model, fullgraph=True) if compiled else model
    return training_step(model, run)


def transforms(names: Sequence[str]) -> Iterator[Row]:
    plain = lambda model: model  # noqa: E731
    steps = {f"compiled {n}": transformed(VARIANTS[n], True) for n in VARIANTS}
    steps |= {f"eager {n}": transformed(VARIANTS[n], False) for n in VARIANTS}
    steps["eager plain"] = transformed(plain, False)
    yield from beside(transformed(plain, True), steps, rounds=30)


# Statistics

NEVER = 10**9
MOST = 0.02
"""The share of all steps that looks may cost."""


def sampled(mode: str, every: int | None) -> Step:
    """A step inside of `fp8.stats`; None: nothing looks."""
    model = gpt()
    looks = None if every is None else fp8.stats(model, every=every)

    def forward(x: Tensor, y: Tensor) -> Any:
        with fp8.autocast("unit"):
            return model(x, y)

    return training_step(model, COMPILERS[mode](forward), inside=looks)


def recorded(recipe: str, mode: str, every: int | None) -> Step:
    """A step of a converted model, with `fp8.record`."""
    model = fp8.convert(gpt(), recipe, backend="simulate")
    run = COMPILERS[mode](model)
    if every is None:
        return training_step(model, run)
    recorder = fp8.record(model, writer=os.devnull, every=every, start=1)
    return training_step(model, run, after=recorder.step)


KINDS: dict[str, tuple[int, Callable[[str, int | None], Step]]] = {
    "fp8.stats": (50, sampled),
    "fp8.record, static": (10, lambda *given: recorded("static", *given)),
    "fp8.record, tensor": (10, lambda *given: recorded("tensor", *given)),
}
"""What looks -> how often it is meant to, and its step by compiler and period."""


def stats(names: Sequence[str]) -> Iterator[Row]:
    for mode in COMPILERS:
        for name, (every, make) in KINDS.items():
            torch.compiler.reset()
            periods = {"looks": 1, "does not look": NEVER}
            steps = {
                f"{name}, {mode}, {what}": make(mode, period)
                for what, period in periods.items()
            }
            looks, rest = beside(make(mode, None), steps)
            cost = (looks["ratio"] - 1) / every
            yield judged({**looks, "every": every, "cost": round(cost, 4)}, MOST, cost)
            yield rest


QUESTIONS = {
    "recipes": "what does a compiled nanoGPT training step cost under a recipe, relative to fp32? "
    "Processor time of one thread; 'deepseek_v3' has the sums of tensor cores; recipes that keep "
    "scales between passes run in converted layers, with attention in float32",
    "transforms": "what does a nanoGPT training step cost, relative to torch.compile of the plain "
    "model? (time of the processor, one thread)",
    "stats": "what does a nanoGPT training step cost when fp8.stats samples it (recipe 'unit'), or "
    "when fp8.record looks at it and writes a file (converted), relative to one without? At one in "
    "N steps the cost of all steps is an Nth of what is beyond 1",
}
PARTS = {"recipes": recipes, "transforms": transforms, "stats": stats}


def main() -> None:
    """Measures, prints and, if nothing is left out, records the rows."""
    parser = argparse.ArgumentParser(prog="benchmarks.steps", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="of recipes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for row in PARTS[given.part](given.names):
        print(row, flush=True)
        rows.append(row)
    (show if given.names else report)(given.part, QUESTIONS[given.part], rows)


if __name__ == "__main__":
    fix_allocator("benchmarks.steps")
    main()
