"""What a step of `fp8.optim.AdamW` costs, beside torch's and bitsandbytes'.

python -m benchmarks.optimizers [MILLIONS ...]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fp8
from benchmarks.common import Row, compare, fix_allocator, report
from fp8.formats.format import dtype_name

QUESTION = (
    "what does an optimizer step over one matrix of 4 million or 40 million parameters cost, "
    "relative to torch's fused AdamW, on one thread and on two? States e4m3 + float16 where not "
    "said otherwise"
)

BLOCKS = {"first_moment": "e4m3_block", "second_moment": "e5m3_block"}

#: Name -> optimizer of a list of parameters, the targets of its ratio to torch's fused AdamW, and
#: where the time of one that misses it goes.
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], float | None, str]] = {
    "torch foreach": (lambda p: torch.optim.AdamW(p, foreach=True), None, ""),
    "fp8 compiled": (
        lambda p: fp8.optim.AdamW(p, compile=True),
        2.0,
        "the loop itself costs 1.1 times torch's; beside it are a look at all of the gradient "
        "before the step, a copy to float32 of what has 16 bits, and Python",
    ),
    "fp8 eager": (fp8.optim.AdamW, None, ""),
    "fp8 compiled, 8-bit blocks": (
        lambda p: fp8.optim.AdamW(p, compile=True, **BLOCKS),
        None,
        "",
    ),
    "fp8 eager, 8-bit blocks": (lambda p: fp8.optim.AdamW(p, **BLOCKS), None, ""),
    "bitsandbytes AdamW8bit": (lambda p: _bitsandbytes().AdamW8bit(p), None, ""),
}


def _bitsandbytes() -> Any:
    import bitsandbytes.optim

    return bitsandbytes.optim


def step(
    make: Callable[[Any], Any], millions: int, dtype: torch.dtype
) -> Callable[[], object]:
    """A step of an optimizer of a matrix of its own, with a fixed gradient."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(millions * 1000, 1000).to(dtype))
    weight.grad = torch.randn_like(weight)
    return make([weight]).step


def rows(millions: int, dtype: torch.dtype, threads: int, rounds: int) -> list[Row]:
    """All optimizers in one comparison."""
    torch.set_num_threads(threads)
    torch.compiler.reset()  # it compiles anew for each of these cases, but not more than 8 times
    fused = step(lambda p: torch.optim.AdamW(p, fused=True), millions, dtype)
    size = f"{millions}M {dtype_name(dtype)}, threads {threads}"
    steps = {
        f"{name}, {size}": step(make, millions, dtype)
        for name, (make, _, _) in OPTIMIZERS.items()
    }
    found = compare(fused, steps, rounds=rounds, warmup=2)
    theirs = found[-1]["ms"]
    for row, (_, target, why) in zip(found, OPTIMIZERS.values(), strict=True):
        row["times_faster_than_bitsandbytes"] = round(theirs / row["ms"], 1)
        if target is not None:
            row["target"], row["met"] = target, row["ratio"] <= target
            if not row["met"]:
                row["where_the_time_goes"] = why
        print(row, flush=True)
    return found


def main() -> None:
    """Measure and write results/optimizers.json."""
    fix_allocator("benchmarks.optimizers")
    sizes = [int(size) for size in sys.argv[1:]] or [4, 40]
    cases = itertools.product((torch.float32, torch.bfloat16), sizes, (1, 2))
    found = [
        row
        for dtype, size, threads in cases
        for row in rows(size, dtype, threads, 20 if size < 10 else 6)
    ]
    report("optimizers", QUESTION, found)


if __name__ == "__main__":
    main()
