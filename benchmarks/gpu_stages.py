"""The stages of `benchmarks.gpu`: each a function of the device and of sizes that gives rows."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

import fp8
from benchmarks.common import Row, compare
from benchmarks.gpu_cases import DTYPE, Case, Sizes, ours, recipes
from benchmarks.gpu_kernels import TIMES, profiled
from benchmarks.gpu_rates import rates, sustained, timed, wait
from fp8.common.step import described
from fp8.kernels.product import why_not_here
from fp8.kernels.selftest import why_not_compiled
from fp8.lab.hardware import BF16

Step = Callable[[], object]

PROFILED = 2.0
"""Seconds that are kept for profiling the kernels of a recipe, after all have been timed."""

COMPILERS = 5
"""Processes that compile our recipes, each under some of them."""

# Before anything is measured: nothing of this is timed, and the stages run side by side


def selftest(device: str, sizes: Sizes) -> Iterator[Row]:
    """For each recipe why it is simulated on the device, as `fp8 doctor` says; "" where kernels
    pass the self-test."""
    where = torch.device(device)
    for name, recipe in fp8.RECIPES.items():
        yield {"recipe": name, "eager": why_not_here(recipe, where, DTYPE)}
    start = time.perf_counter()
    why = why_not_compiled(str(where))
    seconds = round(time.perf_counter() - start, 1)
    yield {"recipe": "casts of compiled code", "compiled": why, "seconds": seconds}


def compiling(part: int, theirs: bool, device: str, sizes: Sizes) -> Iterator[Row]:
    """Compiles what is measured later, into inductor's cache: seconds of the first steps of each
    case. Kernels are not timed, so that a later stage chooses among their configurations."""
    names = [BF16, *ours(device)][part::COMPILERS]
    if theirs:
        names = recipes(theirs, device)
    # Processes begin with different cases, whose memory is not needed at once.
    cases = CASES[part % len(CASES) :] + CASES[: part % len(CASES)]
    with ExitStack() as stack:
        if device == "cuda":
            heuristics = import_module("torch._inductor.runtime.triton_heuristics")
            tuner = heuristics.CachingAutotuner
            patch = mock.patch.object(tuner, "autotune_to_one_config", _take_first)
            stack.enter_context(patch)
        for recipe in names:
            row: Row = {"recipe": recipe}
            for name in cases:
                try:
                    row[f"{name}_s"] = _first_steps(name, recipe, device, sizes)
                except Exception as error:  # of the compiler or of the memory: a result
                    row[f"{name}_error"] = described(error)
                torch.cuda.empty_cache()
            yield row


def _take_first(tuner: Any, *args: object, **kwargs: object) -> None:
    tuner.launchers = tuner.launchers[:1]


def _first_steps(name: str, recipe: str, device: str, sizes: Sizes) -> float:
    case = Case.of(name, sizes, device)
    # Delayed scales have other graphs once they are set.
    return round(timed(partial(case.step, case.variant(recipe)), 2, device), 1)


# What is measured


def measured(name: str, theirs: bool, device: str, sizes: Sizes) -> Iterator[Row]:
    """Rows of a case under each recipe, as soon as it is measured: times beside bf16's; the same of
    replayed graphs; what a step launches. The row of a recipe that fails has the error."""
    names, end = recipes(theirs, device), time.monotonic() + sizes.time
    if not names:
        return
    case = Case.of(name, sizes, device)
    variants = {BF16: case.variant(BF16)}
    case.step(variants[BF16])  # compiled before torchao changes the compiler
    high = Steps(case, variants[BF16])
    for recipe in names if theirs else [BF16, *names]:
        row: Row = {"case": name, "recipe": recipe}
        if time.monotonic() > end - PROFILED * len(variants):
            yield row | {"error": "no time was left"}
            continue
        try:
            if recipe not in variants:
                variants[recipe] = case.variant(recipe)
            for figures in in_both_ways(high, Steps(case, variants[recipe]), sizes):
                yield row | figures
        except Exception as error:  # of a kernel or of the compiler: a result
            variants.pop(recipe, None)
            yield row | {"error": described(error)}
    if device == "cuda":
        yield from launched(case, variants, sizes)


class Steps:
    """A step of a model, and on a GPU its replay."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.device = case.device
        self.step: Step = partial(case.step, model)
        self._replay: Step | None = None

    def replay(self) -> Step:
        """The replay of a step, captured as a CUDA graph by the first call."""
        if self._replay is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            self._replay = graph.replay
        return self._replay


def in_both_ways(high: Steps, low: Steps, sizes: Sizes) -> Iterator[Row]:
    """The time of a step under a recipe and in bf16, in turns; on a GPU the peak of the memory, and
    the time of replayed graphs ("gpu_..."), whose kernels wait for no launch of the host."""
    yield in_turns(high.step, low.step, low.device, sizes)
    if low.device != "cuda":
        return
    torch.cuda.reset_peak_memory_stats()
    low.step()
    yield {"peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 2)}
    try:
        replayed = in_turns(high.replay(), low.replay(), low.device, sizes)
        yield {f"gpu_{key}": value for key, value in replayed.items()}
    except Exception as error:  # what was measured before stays
        yield {"gpu_error": described(error)}


def in_turns(high: Step, low: Step, device: str, sizes: Sizes) -> Row:
    """The row of `compare` for two functions; of long ones with half the rounds."""

    def clock() -> float:
        wait(device)
        return time.perf_counter()

    is_long = timed(high, 1, device) > sizes.seconds
    rounds = sizes.rounds // 2 if is_long else sizes.rounds
    row, *_ = compare(
        high, {"": low}, rounds=rounds, seconds=sizes.seconds, clock=clock
    )
    del row["name"]
    return row


def launched(
    case: Case, variants: Mapping[str, nn.Module], sizes: Sizes
) -> Iterator[Row]:
    """What a step launches under each recipe, and its kernels, on a warm card. It comes last: the
    profiler makes later launches slower."""
    for recipe, model in variants.items():
        row: Row = {"case": case.name, "recipe": recipe}
        step, seconds = partial(case.step, model), 5 * sizes.seconds
        try:
            load = sustained(step, case.device, seconds)
            found = profiled(step, 2 * max(1, int(seconds / load.warm / 2)))
            yield row | load.state | found.row() | {TIMES: found.details()}
        except Exception as error:  # of the profiler: a result
            yield row | {"profile_error": described(error)}


# Beside it


def tests(device: str, sizes: Sizes) -> Iterator[Row]:
    """``pytest -m gpu``: for each file the counts, and the names of those that fail."""
    command = [sys.executable, *"-m pytest -m gpu -q -rf -p no:cacheprovider".split()]
    files = Path("tests").rglob("test_*.py")
    marked = [path for path in files if "mark.gpu" in path.read_text()]
    for file in sorted(marked, key=lambda path: ("kernels" not in path.parts, path)):
        done = subprocess.run([*command, str(file)], stdout=subprocess.PIPE, text=True)
        counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)
        failed = re.findall(r"^FAILED (\S+)", done.stdout, re.M)
        yield {
            "file": str(file),
            **{what: int(n) for n, what in counts},
            "names": failed,
        }


CASES = ("linear", "head", "block", "readout")
"""What is compiled ahead; a model is blocks and a readout."""


class Stage(NamedTuple):
    """A stage of the benchmark.

    run: gives its rows. group: stages of one group run side by side. seconds: its share of the
    time of the benchmark.
    """

    run: Callable[[str, Sizes], Iterator[Row]]
    group: str
    seconds: float
    about: str


before = partial(Stage, group="before", seconds=70.0)

STAGES: dict[str, Stage] = {
    "selftest": before(selftest, about="of the kernels, for each recipe"),
    **{
        f"compile {part}": before(
            partial(compiling, part, False), about="a share of our recipes, ahead"
        )
        for part in range(COMPILERS)
    },
    "compile torchao": before(partial(compiling, 0, True), about="torchao's, ahead"),
    "rates": Stage(rates, "rates", 48.0, "sustained products, copies; launches"),
}
"""Name -> stage, what matters most first."""

for theirs, of, share in ((False, "", 1.0), (True, " torchao", 0.35)):
    for name, seconds, about in (
        ("linear", 40.0, "nanochat's layer, 65536 x 1664 x 6656"),
        ("block", 65.0, "a Llama block of width 2048, 4096 tokens"),
        ("model", 70.0, "26 of them with 32768 words"),
        ("head", 40.0, "nanochat's head, 65536 x 768 x 32768"),
    ):
        run = partial(measured, name, theirs)
        STAGES[name + of] = Stage(run, name + of, share * seconds, about)
STAGES["tests"] = Stage(tests, "tests", 75.0, "pytest -m gpu")
