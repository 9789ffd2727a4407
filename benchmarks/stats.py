"""What `fp8.stats` costs: a training step of a GPT that it samples, beside one without it.

python -m benchmarks.stats
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import fp8
from benchmarks.common import Row, compare, fix_allocator, report
from benchmarks.ops import COMPILERS
from notebooks.nanogpt.model import GPT, GPTConfig

QUESTION = (
    "what does a nanoGPT training step under recipe 'unit' cost when fp8.stats samples it, relative"
    " to one without? At 1 in 50 the cost of all steps is a fiftieth of what is beyond 1"
)

EVERY, TARGET = 50, 0.02


def training_step(mode: str, every: int | None) -> Callable[[], object]:
    """Forward, backward and an AdamW step on one batch of 16 x 128 tokens, inside of `fp8.stats`
    that samples one of ``every`` passes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=65, context=128, layers=4, heads=4, width=128))
    ids = torch.randint(0, 65, (16, 129))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: Any = nullcontext() if every is None else fp8.stats(model, every=every)

    def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
        with fp8.autocast("unit"):
            return model(x, y)

    run = COMPILERS[mode](forward)

    def step() -> None:
        with seen:
            _, loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def rows(mode: str) -> list[Row]:
    """A sampled step and one that is not, beside a step without statistics."""
    torch.compiler.reset()
    names = {f"{mode}, sampled": 1, f"{mode}, not sampled": 10**9}
    steps = {name: training_step(mode, every) for name, every in names.items()}
    found = compare(training_step(mode, None), steps, rounds=20)
    cost = (found[0]["ratio"] - 1) / EVERY
    found[0] |= {
        "cost_at_1_in_50": round(cost, 4),
        "target": TARGET,
        "met": cost <= TARGET,
    }
    return found


if __name__ == "__main__":
    fix_allocator("benchmarks.stats")
    report("stats", QUESTION, [row for mode in COMPILERS for row in rows(mode)])
