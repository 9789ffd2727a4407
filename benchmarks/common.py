"""What every benchmark shares: a fixed allocator, paired timing, and rows with the machine and the
commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8.common.report import as_table

RESULTS = Path(__file__).parent / "results"

THREADS = 2

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
}
"""Keep freed memory in the process: with glibc's defaults page faults swing elementwise timings by
a factor of two."""

Row = dict[str, Any]


def fix_allocator(module: str) -> None:
    """Start `python -m module` anew with ALLOCATOR set, unless it is: glibc reads these when a
    process starts."""
    torch.set_num_threads(THREADS)
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        arguments = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **ALLOCATOR})


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    root = Path(__file__).parent.parent
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changes = subprocess.run(
        [*git, "status", "--porcelain", "--", "*.py"], capture_output=True, text=True
    )
    return {
        "cpu": _cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "allocator": ALLOCATOR,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "uncommitted_changes": bool(changes.stdout.strip()),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return models[0] if models else platform.processor() or platform.machine()


def compare(
    baseline: Callable[[], object],
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 40,
    warmup: int = 3,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Time each candidate side by side with `baseline`: one row per candidate.

    Every round times the baseline and all candidates once, in an order drawn anew, so that drift of
    the machine, and what one leaves in the caches for the next, fall on all alike; the ratio is the
    median over rounds of candidate / baseline of the same round, with a 95 % confidence interval
    from 2000 bootstrap resamples of the rounds.
    `seconds` asks for repeating a call until it takes about that long, for functions of
    microseconds. `clock`: `time.process_time` for work of one thread beside other load.
    """
    functions = [baseline, *candidates.values()]
    for function in functions:
        for _ in range(warmup):
            function()
    repeats = [_repeats(function, seconds, clock) for function in functions]
    times = np.zeros((rounds, len(functions)))
    generator = np.random.default_rng(0)
    for i in range(rounds):
        for j in generator.permutation(len(functions)):
            times[i, j] = _time(functions[j], repeats[j], clock)
    return [
        _row(name, times[:, 0], times[:, j + 1]) for j, name in enumerate(candidates)
    ]


def _time(
    function: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> float:
    start = clock()
    for _ in range(repeats):
        function()
    return (clock() - start) / repeats


def _repeats(
    function: Callable[[], object], seconds: float, clock: Callable[[], float]
) -> int:
    return max(1, int(seconds / max(_time(function, 1, clock), 1e-9)))


def _row(name: str, baseline: np.ndarray, candidate: np.ndarray) -> Row:
    ratios = candidate / baseline
    generator = np.random.default_rng(0)
    resampled = np.median(generator.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return {
        "name": name,
        "ratio": round(float(np.median(ratios)), 3),
        "ratio_low": round(float(low), 3),
        "ratio_high": round(float(high), 3),
        "ms": round(float(np.median(candidate)) * 1e3, 4),
        "baseline_ms": round(float(np.median(baseline)) * 1e3, 4),
        "rounds": len(ratios),
    }


class Lines:
    """A file of one JSON object a line, so that a benchmark that was interrupted goes on."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]

    def add(self, row: Row) -> None:
        """Adds a row to the file."""
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class Finished:
    """Runs that are finished, with the commit that made them, in a file of `Lines`."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._losses = {self._key(run): run["loss"] for run in self._lines.rows}

    @staticmethod
    def _key(run: Mapping[str, Any]) -> str:
        return json.dumps(
            {k: v for k, v in run.items() if k not in ("loss", "commit", "compiled")},
            sort_keys=True,
        )

    def __contains__(self, run: Mapping[str, Any]) -> bool:
        return self._key(run) in self._losses

    def loss(
        self,
        run: Mapping[str, Any],
        train: Callable[[], float],
        *,
        compiled: bool = False,
    ) -> float:
        """The loss of a run with these settings, plain values: ``train()``, once."""
        key = self._key(run)
        if key not in self._losses:
            self._losses[key] = train()
            made = {"loss": self._losses[key], "commit": machine()["commit"]}
            made |= {"compiled": True} if compiled else {}
            self._lines.add({**run, **made})
        return self._losses[key]


def report(name: str, question: str, rows: Sequence[Row]) -> Path:
    """Print the rows and `write` them."""
    show(name, question, rows)
    return write(name, question, rows)


def show(name: str, question: str, rows: Sequence[Row]) -> None:
    """Print the rows."""
    print(f"\n{name}: {question}")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([str(row.get(key, "")) for key in columns] for row in rows)]
    print(as_table(cells))


def write(name: str, question: str, rows: Sequence[Row]) -> Path:
    """Write the rows with the question and the machine to results/NAME.json."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    record = {"question": question, "machine": machine(), "rows": list(rows)}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
