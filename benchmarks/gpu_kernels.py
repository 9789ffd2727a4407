"""What a step launches on a GPU, by torch's profiler: kernels, their times and their instructions.

The instructions of a Triton kernel are those of its machine code in the configuration that
autotuning chose. Names of inductor that are private are in `_winners`; without them, or without
Triton's disassembler, a kernel has its time alone.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Row
from fp8.common.step import described
from fp8.lab.forecast.assembly import Configuration, code_of

# An event of a trace in Chrome's format; an object of inductor.
Event = dict[str, Any]
Launcher = Any

TIMES = "kernel_times"
"""In a row of results: `Step.details`."""

SHARE = 0.01
"""Of a step's time: shorter kernels are listed without instructions."""

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
    """What a step launches. launches: of the host; those of a graph count once."""

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
        rows = []
        total = sum(kernel.count * kernel.us for kernel in self.kernels)
        for kernel in sorted(self.kernels, key=lambda k: -k.count * k.us):
            row = {**kernel._asdict(), "us": round(kernel.us, 2)}
            if kernel.kind == "triton" and kernel.count * kernel.us > SHARE * total:
                try:
                    row["instructions"] = round(instructions(kernel), 2)
                except Exception as error:  # of private names, of tools: the time stays
                    row["uncounted"] = described(error)
            rows.append(row)
        return rows


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


# Machine code


def instructions(kernel: Kernel) -> float:
    """The instructions that a Triton kernel executes for each element of its iteration."""
    for source, folder in _winners(kernel):
        path = folder / f"{kernel.name}.cubin"
        binary = SimpleNamespace(
            metadata=SimpleNamespace(num_warps=kernel.warps, shared=0),
            asm={
                "cubin": path.read_bytes(),
                "ttgir": path.with_suffix(".ttgir").read_text(),
            },
        )
        code = code_of(Configuration(binary, kernel.blocks, {}), source)
        sizes = re.findall(r"^\s+\w*numel\w* = (\d+)$", source, re.M)
        threads = 32 * kernel.warps * kernel.blocks
        return code.instructions * threads / prod(map(int, sizes))
    raise LookupError(f"no compiled kernel is named {kernel.name}")


def _winners(kernel: Kernel) -> Iterator[tuple[str, Path]]:
    """The source of a kernel and the folder of Triton's cache that has its binary, the newest
    first. Inductor keeps the modules that it generates, each kernel with its launchers."""
    cache = Path(import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())
    modules = import_module("torch._inductor.codecache").PyCodeCache.modules
    for module in reversed(modules):
        tuner = vars(module).get(kernel.name)
        launchers: list[Launcher] = getattr(tuner, "launchers", [])
        for launcher in launchers:
            if launcher.n_regs == kernel.registers:
                for folder in cache.glob(f"triton/*/{launcher.cache_hash}"):
                    yield tuner.fn.src, folder
