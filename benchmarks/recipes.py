"""What the recipes cost where they are simulated: a training step of a compiled GPT under each.

python -m benchmarks.recipes [recipe ...]

Processor time of one thread. A row is printed when it is there; the table is recorded if it has all
recipes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fp8
from benchmarks.common import Row, compare, fix_allocator, report, show
from notebooks.nanogpt.model import GPT, GPTConfig

QUESTION = (
    "what does a compiled nanoGPT training step cost under a recipe, relative to fp32? Processor "
    "time of one thread; 'deepseek_v3' has the sums of tensor cores; recipes that keep scales "
    "between passes run in converted layers, with attention in float32"
)

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


def training_step(model: nn.Module, recipe: str | None) -> Callable[[], object]:
    """Forward, backward and an AdamW step on one batch of 16 x 128 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 65, (16, 129), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    keeps = recipe is not None and fp8.RECIPES[recipe].keeps_history
    if recipe is not None and keeps:
        fp8.convert(model, recipe, backend="simulate")
    if recipe == "static":
        fp8.calibrate(model, (ids[:, :-1], ids[:, 1:]))

    def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
        if recipe is None or keeps:
            return model(x, y)
        with fp8.autocast(recipe):
            return model(x, y)

    run = torch.compile(forward, fullgraph=True)

    def step() -> None:
        _, loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(name: str) -> Row:
    """The step under a recipe beside the plain one, both compiled anew: torch keeps a few compiled
    forms of a function only."""
    torch.compiler.reset()
    config = GPTConfig(vocab=65, context=128, layers=4, heads=4, width=128)
    steps = []
    for recipe in (None, name):
        torch.manual_seed(0)
        steps.append(training_step(GPT(config), recipe))
    (row,) = compare(steps[0], {name: steps[1]}, rounds=20, clock=time.process_time)
    target = TARGETS.get(name)
    return {
        **row,
        "target": target,
        "met": None if target is None else row["ratio"] <= target,
    }


def main(names: Sequence[str]) -> None:
    """Measures, prints and, if all are asked for, records the rows."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in names or fp8.RECIPES:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    (show if names else report)("recipes", QUESTION, rows)


if __name__ == "__main__":
    fix_allocator("benchmarks.recipes")
    main(sys.argv[1:])
