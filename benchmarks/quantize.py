"""What does quantizing 16M float32 to e4m3 cost, against copying them?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import Row, compare, fix_allocator, report
from fp8 import quantize

ELEMENTS = 1 << 24

TARGETS = {
    "compiled nearest": 1.2,
    "compiled stochastic": 2.5,
    "eager nearest": 4.0,
    "eager nearest, bf16 tensor": None,
    "eager stochastic": None,
}
"""What each case may cost, in copies; None where there is no target."""

NOTES = {
    "compiled stochastic": "bound by arithmetic, not by memory: three rounds of integer hashing for"
    " the random bits are half of its 60 vector instructions for 16 values; so the ratio goes with"
    " the speed of the copy, from 2.5 to 3.2 on this machine",
    "eager stochastic": "every operation of the hash is a pass over memory",
}
"""Where the time goes, where a target is missed or the ratio is large."""


def cases() -> dict[str, Callable[[Tensor], Tensor]]:
    """One function per row of TARGETS."""

    def nearest(x: Tensor) -> Tensor:
        return quantize(x, "e4m3")

    def stochastic(x: Tensor) -> Tensor:
        return quantize(x, "e4m3", rounding="stochastic", seed=0)

    return {
        "compiled nearest": torch.compile(nearest, fullgraph=True),
        "compiled stochastic": torch.compile(stochastic, fullgraph=True),
        "eager nearest": nearest,
        "eager stochastic": stochastic,
    }


def main() -> None:
    """Time the cases side by side and record them."""
    fix_allocator("benchmarks.quantize")
    x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    functions = cases()
    slow = {"eager stochastic"}
    rows: list[Row] = []
    for chosen, rounds in ((set(functions) - slow, 60), (slow, 7)):
        bound = {
            name: (lambda f=f: f(x)) for name, f in functions.items() if name in chosen
        }
        rows += compare(x.clone, bound, rounds=rounds)
    half = x.bfloat16()
    rows += compare(
        half.clone,
        {"eager nearest, bf16 tensor": lambda: quantize(half, "e4m3")},
        rounds=20,
    )
    for row in rows:
        row["target"] = target = TARGETS[row["name"]]
        row["met"] = None if target is None else row["ratio"] <= target
        row["where the time goes"] = NOTES.get(row["name"])
    report("quantize", "quantize(x, 'e4m3') against x.clone(), 16M elements", rows)


if __name__ == "__main__":
    main()
