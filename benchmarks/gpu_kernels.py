"""What a step launches on a GPU, by torch's profiler: kernels and their times."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Row

# An event of a trace in Chrome's format.
Event = dict[str, Any]

TIMES = "kernel_times"
"""In a row of results: `Step.details`."""


KINDS = {
    "triton": r"^triton_",
    "attention": r"flash|fmha|attention|sdpa",
    "product": r"gemm|nvjet|cutlass|cublas|gemv|splitk|matmul",
}
"""Kind of a kernel -> what its name contains, the first that matches; else "other"."""


class Kernel(NamedTuple):
    """A kernel of a step.

    count: launches of a step. us: the mean time. blocks, warps: of the grid, and of a block.
    """

    name: str
    count: float
    us: float
    blocks: int
    warps: int
    registers: int

    @property
    def kind(self) -> str:
        kinds = (k for k, text in KINDS.items() if re.search(text, self.name, re.I))
        return next(kinds, "other")


class Step(NamedTuple):
    """What a step launches. launches: of the host; a graph counts as one."""

    kernels: tuple[Kernel, ...]
    launches: float

    def row(self) -> Row:
        """The counts, and the milliseconds of the kernels of each kind."""
        row: Row = {
            "kernels": round(sum(kernel.count for kernel in self.kernels), 1),
            "launches": round(self.launches, 1),
        }
        for kind in dict.fromkeys((*KINDS, "other")):
            us = sum(k.count * k.us for k in self.kernels if k.kind == kind)
            row[f"{kind}_ms"] = round(us / 1e3, 4)
        return row

    def details(self) -> list[Row]:
        """A row for each kernel, those that take longest first."""
        ordered = sorted(self.kernels, key=lambda k: -k.count * k.us)
        return [{**kernel._asdict(), "us": round(kernel.us, 2)} for kernel in ordered]


def profiled(step: Callable[[], object], repeats: int) -> Step:
    """The mean of the later half of so many steps, which run without a wait between them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return in_trace(json.loads(path.read_text())["traceEvents"], repeats)


def in_trace(events: Sequence[Event], repeats: int) -> Step:
    """What is launched in the later half of the steps of a trace."""
    steps = repeats - repeats // 2
    kernels = _later([e for e in events if e.get("cat") == "kernel"], repeats)
    alike: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for event in kernels:
        of = event["args"]
        warps = -(-prod(of["block"]) // 32)
        key = (event["name"], prod(of["grid"]), warps, of["registers per thread"])
        alike[key].append(event["dur"])
    host = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    # The runtime's calls of the driver have its number.
    launches = {
        e["args"]["correlation"]
        for e in host
        if re.search("Launch|Memcpy|Memset", e["name"])
    }
    return Step(
        tuple(
            Kernel(name, len(times) / steps, mean(times), *rest)
            for (name, *rest), times in alike.items()
        ),
        len(launches) / repeats,
    )


def _later(events: list[Event], repeats: int) -> list[Event]:
    """The events of the later half of the steps."""
    ordered = sorted(events, key=lambda event: event["ts"])
    return ordered[len(ordered) // repeats * (repeats // 2) :]
