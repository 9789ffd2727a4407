"""What FP8 gains on a GPU: one command of at most eight minutes, `make gpu`.

python -m benchmarks.gpu [--list] [--small] [--seconds 470] [--out FILE] [STAGE ...]

Each stage runs in a process of its own and sends rows, which are written at once: the files are
complete up to the moment at which the command is ended, by SIGTERM, by Ctrl-C or by the time. A
stage that fails, hangs or runs out of its time is ended, and the next one begins. Named stages
replace their rows in the files and leave the others. Kernels are in a file of their own,
out/gpu_kernels.json, or beside the file of --out. Nothing is downloaded; what is compiled stays in
out/inductor for a second run. --seconds is divided among the stages; with fewer than 16 cores give
it 800. The forecasts beside it need no GPU: `python -m benchmarks.forecast`, on any machine.

"--device cpu --small" shows that the script runs: products are simulated or torch's CPU kernels,
nothing is compiled to code, and times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import RESULTS, Row, machine, show
from benchmarks.gpu_cases import Sizes
from benchmarks.gpu_kernels import TIMES
from benchmarks.gpu_stages import STAGES
from fp8.common.report import as_table
from fp8.kernels.selftest import trusted
from fp8.lab.preflight.preflight import terminable

QUESTION = """\
what does a step, forward and backward, of a bf16 model cost on a GPU under an FP8 recipe, relative
to bf16 (paired rounds on one warm card; ratio: median, and the 95 % interval of 2000 resamples)"""

SECONDS = 470.0
"""For everything: the command promises eight minutes."""

CACHE = Path("out/inductor")
"""What inductor has compiled, for the stages of this run and of later ones."""

ROWS = "ROWS"
"""What stands for the rows while a record is made."""

GRAPHS = 256
"""The most graphs of a function, which has one under each recipe."""

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a stage."""


class Record:
    """The files of results, written after each change: first under another name, so that they are
    whole at any moment."""

    def __init__(
        self, path: Path, kernels: Path, stages: Sequence[str], device: str
    ) -> None:
        self._path, self._kernels = path, kernels
        before = json.loads(path.read_text()) if path.exists() else {}
        listed = json.loads(kernels.read_text()) if kernels.exists() else []
        rows = [r for r in before.get("rows", ()) if r["stage"] not in stages]
        here = machine() | ({"device": device} if device else {})
        if rows:
            here |= before["machine"]
        ended = before.get("stages", {})
        self.values: dict[str, Any] = {
            "question": QUESTION,
            "machine": here,
            "stages": {name: end for name, end in ended.items() if name not in stages},
            "rows": rows,
        }
        self.kernels = [row for row in listed if row["stage"] not in stages]
        self.save()

    def add(self, stage: str, row: Row) -> None:
        """Adds a row, or its figures to the row of the stage for the same case and recipe."""
        row = {"stage": stage, **row}
        times = row.pop(TIMES, ())
        named = {key: row[key] for key in ("stage", "case", "recipe") if key in row}
        self.kernels += [{**named, **kernel} for kernel in times]
        rows: list[Row] = self.values["rows"]
        same = (r for r in rows if "case" in row and named.items() <= r.items())
        found = next(same, None)
        if found is None:
            rows.append(row)
        else:
            found.update(row)
        self.save()

    def end(self, stage: str, how: str, seconds: float) -> None:
        self.values["stages"][stage] = {"ended": how, "seconds": round(seconds, 1)}
        self.save()

    def save(self) -> None:
        text = json.dumps({**self.values, "rows": ROWS}, indent=2)
        rows = in_lines(self.values["rows"])
        written(self._path, text.replace(json.dumps(ROWS), rows))
        written(self._kernels, in_lines(self.kernels))


def in_lines(rows: Sequence[Row]) -> str:
    """A list in JSON, a row to a line."""
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]"


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


class Target(NamedTuple):
    """What is measured. device: "cuda" or "cpu". small: with small sizes."""

    device: str
    small: bool


class Process:
    """A stage in a process of its own, which imports what it needs and waits until `begin`. Its
    rows are put into a queue with its name; None at its end."""

    def __init__(self, stage: str, target: Target, rows: queue.Queue[Any]) -> None:
        self.stage, self._begun = stage, time.monotonic()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(CACHE.absolute()), **os.environ}
        if STAGES[stage].group == "before":  # with the processes of the others
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        command = [sys.executable, "-m", "benchmarks.gpu", "--run", stage]
        command += ["--device", target.device, *(["--small"] if target.small else [])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,  # a signal of the terminal is the parent's
        )
        self._reader = threading.Thread(target=self._read, args=(rows,), daemon=True)
        self._reader.start()

    def begin(self, until: float) -> None:
        self._begun = time.monotonic()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as begins:
            print(until - self._begun, file=begins)  # if it has not failed

    def _read(self, rows: queue.Queue[Any]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # what else is printed
                    rows.put((self.stage, json.loads(line)))
        rows.put((self.stage, None))

    def stop(self) -> None:
        """Ends it with its children."""
        self._signal(signal.SIGTERM)
        self._wait()

    def end(self, record: Record, why: str = "") -> None:
        """Ends it, if it still runs, and records how."""
        if why:
            self._signal(signal.SIGTERM)
        self._wait()
        done = self._process.returncode == 0
        how = why or ("done" if done else f"failed: {self._last_error()}")
        record.end(self.stage, how, time.monotonic() - self._begun)
        self._errors.close()

    def _wait(self) -> None:
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._reader.join(GRACE)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"exit code {self._process.returncode}: {(lines or [''])[-1][:300]}"


class Group:
    """Stages that run side by side."""

    def __init__(self, stages: Sequence[str], target: Target) -> None:
        self._rows: queue.Queue[Any] = queue.Queue()
        self._running = {stage: Process(stage, target, self._rows) for stage in stages}

    def run(self, record: Record, until: float) -> None:
        """Runs the stages until they end or the time has come."""
        for process in self._running.values():
            process.begin(until)
        try:
            while self._running:
                stage, row = self._rows.get(timeout=max(until - time.monotonic(), 0.0))
                if row is None:
                    self._running.pop(stage).end(record)
                else:
                    record.add(stage, row)
                    shown = {k: v for k, v in row.items() if k != TIMES}
                    print(stage, shown, flush=True)
        except queue.Empty:
            for stage in list(self._running):
                self._running.pop(stage).end(record, "its time was up")
        finally:
            for process in self._running.values():
                process.end(record, "interrupted")

    def stop(self) -> None:
        """Ends the processes of stages that have not begun."""
        for process in self._running.values():
            process.stop()


def run_all(
    stages: Sequence[str], record: Record, seconds: float, target: Target
) -> None:
    """Runs the groups of the stages one after another. Time that one leaves is the next ones'."""
    end = time.monotonic() + seconds
    groups: dict[str, list[str]] = {}
    for stage in stages:
        groups.setdefault(STAGES[stage].group, []).append(stage)
    shares = [max(STAGES[s].seconds for s in group) for group in groups.values()]
    ahead: deque[Group] = deque()
    waiting = deque(groups.values())
    try:
        for i, share in enumerate(shares):
            if not ahead:
                ahead.append(Group(waiting.popleft(), target))
            # The next stage imports what it needs meanwhile.
            if waiting and len(waiting[0]) == 1:
                ahead.append(Group(waiting.popleft(), target))
            left = end - GRACE - time.monotonic()
            until = time.monotonic() + left * share / sum(shares[i:])
            ahead.popleft().run(record, until)
    finally:
        for group in ahead:
            group.stop()


def card() -> str:
    """The name of the GPU; "" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main(arguments: list[str] | None = None) -> None:
    """Runs the stages that the arguments name, or all, and writes the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    add = parser.add_argument
    add("--device", default="cuda")
    add("--small", action="store_true", help="small sizes, to try the script")
    add("--seconds", type=float, default=SECONDS, help="for everything (%(default)s)")
    add("--out", type=Path, help="(benchmarks/results/gpu.json; else out/gpu.json)")
    add("--list", action="store_true", help="what the stages do, and their seconds")
    add("--run", choices=STAGES, help=argparse.SUPPRESS)
    add("stages", nargs="*", default=[], help=f"of {', '.join(STAGES)}")
    given = parser.parse_args(arguments)
    if given.list:
        print(listed())
        return
    sizes = Sizes.small() if given.small else Sizes()
    if given.run:
        run(given.run, given.device, sizes)
        return
    unknown = [stage for stage in given.stages if stage not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; choose of {', '.join(STAGES)}")
    stages = given.stages or list(STAGES)
    if given.device == "cuda" and not card():
        parser.error("no CUDA device; --device cpu --small shows that the script runs")
    recorded = given.device == "cuda" and not given.small
    path = given.out or (RESULTS if recorded else Path("out")) / "gpu.json"
    folder = given.out.parent if given.out else Path("out")
    with terminable():
        record = Record(path, folder / "gpu_kernels.json", stages, card())
        target = Target(given.device, given.small)
        try:
            run_all(stages, record, given.seconds, target)
        except KeyboardInterrupt:
            print("interrupted")
        for stage, end in record.values["stages"].items():
            if stage not in stages:
                continue
            rows = [row for row in record.values["rows"] if row["stage"] == stage]
            show(stage, end["ended"], rows)
        print(f"written: {path}")


def listed() -> str:
    """A table of the stages."""
    rows = [
        [name, stage.group, f"{stage.seconds:.0f}", stage.about]
        for name, stage in STAGES.items()
    ]
    return as_table([["stage", "side by side", "seconds", "content"], *rows])


def run(stage: str, device: str, sizes: Sizes) -> None:
    """Prints the rows of a stage, once its input says how many seconds it has."""
    if device == "cuda":
        torch.cuda.init()
        import_module("torch._inductor.compile_fx")
    torch._dynamo.config.recompile_limit = GRAPHS
    sizes = replace(sizes, time=float(sys.stdin.readline()))
    # That is a stage of its own, and takes seconds in each process.
    with nullcontext() if stage == "selftest" else trusted():
        for row in STAGES[stage].run(device, sizes):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
