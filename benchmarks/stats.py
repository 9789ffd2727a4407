"""What `fp8.stats` and `fp8.record` cost: a training step of a GPT that they look at, beside one
without them.

python -m benchmarks.stats
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fp8
from benchmarks.common import Row, compare, fix_allocator, report
from benchmarks.ops import COMPILERS
from notebooks.nanogpt.model import GPT, GPTConfig

QUESTION = (
    "what does a nanoGPT training step cost when fp8.stats samples it (recipe 'unit'), or when "
    "fp8.record looks at it and writes a file (converted), relative to one without? At one in N "
    "steps the cost of all steps is an Nth of what is beyond 1"
)

NEVER = 10**9
TARGET = 0.02


@dataclass(frozen=True)
class Kind:
    """What looks. every: how often at its target. make: of the compiler and the period (None:
    nothing looks), a step."""

    every: int
    make: Callable[[str, int | None], Callable[[], object]]


Batch = tuple[Tensor, Tensor]


def problem() -> tuple[nn.Module, Batch, torch.optim.Optimizer]:
    """A GPT, one batch of 16 x 128 tokens, and AdamW."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=65, context=128, layers=4, heads=4, width=128))
    ids = torch.randint(0, 65, (16, 129))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, (ids[:, :-1], ids[:, 1:]), optimizer


def sampled(mode: str, every: int | None) -> Callable[[], object]:
    """A step inside of `fp8.stats`."""
    model, batch, optimizer = problem()
    seen: Any = nullcontext() if every is None else fp8.stats(model, every=every)

    def forward(x: Tensor, y: Tensor) -> Any:
        with fp8.autocast("unit"):
            return model(x, y)

    run = COMPILERS[mode](forward)

    def step() -> None:
        with seen:
            _, loss = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def recorded(recipe: str) -> Callable[[str, int | None], Callable[[], object]]:
    """A step of a converted model, with `fp8.record`."""

    def make(mode: str, every: int | None) -> Callable[[], object]:
        model, batch, optimizer = problem()
        fp8.convert(model, recipe, backend="simulate")
        run = COMPILERS[mode](model)
        recorder: Any = None
        if every is not None:
            recorder = fp8.record(model, writer=os.devnull, every=every, start=1)

        def step() -> None:
            _, loss = run(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if recorder is not None:
                recorder.step(loss)

        return step

    return make


KINDS = {
    "fp8.stats": Kind(50, sampled),
    "fp8.record, static": Kind(10, recorded("static")),
    "fp8.record, tensor": Kind(10, recorded("tensor")),
}


def rows(name: str, kind: Kind, mode: str) -> list[Row]:
    """A step with a look and one without, beside a step without statistics."""
    torch.compiler.reset()
    names = {f"{name}, {mode}, looks": 1, f"{name}, {mode}, does not look": NEVER}
    steps = {label: kind.make(mode, every) for label, every in names.items()}
    # Of one thread, so that other load on the machine does not count.
    plain = kind.make(mode, None)
    found = compare(plain, steps, rounds=20, clock=time.process_time)
    cost = (found[0]["ratio"] - 1) / kind.every
    found[0] |= {
        "every": kind.every,
        "cost": round(cost, 4),
        "target": TARGET,
        "met": cost <= TARGET,
    }
    return found


if __name__ == "__main__":
    fix_allocator("benchmarks.stats")
    torch.set_num_threads(1)
    found: list[Row] = []
    for mode in COMPILERS:
        for name, kind in KINDS.items():
            found += rows(name, kind, mode)
            print(*found[-2:], sep="\n", flush=True)
    report("stats", QUESTION, found)
