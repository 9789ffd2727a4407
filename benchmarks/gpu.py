"""What FP8 gains on a GPU: one command of at most eight minutes, `make gpu`.

python -m benchmarks.gpu [--device cuda] [--small] [--seconds 470] [--out FILE] [STAGE ...]

Each stage runs in a process of its own and sends rows, which are written at once: the file is
complete up to the moment at which the command is ended, by SIGTERM, by Ctrl-C or by the time. A
stage that fails, hangs or runs out of its time is ended, and the next one begins. Named stages
replace their rows in the file and leave the others.

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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, Row, machine, show
from benchmarks.gpu_stages import FORECASTS, STAGES, Sizes
from fp8.lab.hardware import BF16
from fp8.lab.preflight.preflight import terminable

QUESTION = """\
what does a step, forward and backward, of a bf16 model cost on a GPU under an FP8 recipe, relative
to bf16 (paired rounds on one warm card; ratio: median, and the 95 % interval of 2000 resamples);
forecast: what fp8.forecast says"""

SECONDS = 470.0
"""For everything: the command promises eight minutes."""

RATES = {
    "selftest": 70.0,
    "rates": 30.0,
    "nanochat": 45.0,
    "block": 75.0,
    "model": 60.0,
}
RATES |= {"nanochat torchao": 25.0, "block torchao": 35.0, "model torchao": 30.0}
LAST = {"tests": 100.0, **dict.fromkeys(FORECASTS, 100.0)}
"""Stage -> its share of the time, in seconds of SECONDS. Those of LAST time nothing and run side by
side; time that a stage leaves is the next ones'."""

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a stage."""


class Record:
    """The file of results, written after each change: first under another name, so that it is whole
    at any moment."""

    def __init__(self, path: Path, stages: Sequence[str], device: str) -> None:
        self._path = path
        before = json.loads(path.read_text()) if path.exists() else {}
        self.values: dict[str, Any] = {
            "question": QUESTION,
            "machine": machine() | before.get("machine", {}) | {"device": device},
            "stages": {
                k: v for k, v in before.get("stages", {}).items() if k not in stages
            },
            "rows": [
                row for row in before.get("rows", ()) if row["stage"] not in stages
            ],
        }
        self.save()

    def add(self, stage: str, row: Row) -> None:
        self.values["rows"].append({"stage": stage, **row})
        self.save()

    def end(self, stage: str, how: str, seconds: float) -> None:
        self.values["stages"][stage] = {"ended": how, "seconds": round(seconds, 1)}
        self.save()

    def save(self) -> None:
        self.values["rows"] = with_forecasts(self.values["rows"])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.values, indent=2) + "\n")
        temporary.replace(self._path)


def with_forecasts(rows: list[Row]) -> list[Row]:
    """The rows, measured ones with the forecast of their case and recipe: its ratio to bf16, and by
    how much it is off, of replayed graphs if they were measured. A model is the sum of its parts.
    """
    forecast: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["stage"] in FORECASTS:
            case, recipe = row["case"], row["recipe"]
            forecast[case, recipe] = row["ms"]
            in_model = row["times_in_model"] * row["ms"]
            forecast["model", recipe] = forecast.get(("model", recipe), 0.0) + in_model
    for case, recipe in list(forecast):
        if (
            case == "model"
            and not {("block", recipe), ("readout", recipe)} <= forecast.keys()
        ):
            del forecast[case, recipe]
    return [_with_forecast(row, forecast) for row in rows]


def _with_forecast(row: Row, forecast: dict[tuple[str, str], float]) -> Row:
    case, recipe = row.get("case", ""), row.get("recipe", "")
    if (
        row["stage"] in FORECASTS
        or "ratio" not in row
        or (case, recipe) not in forecast
    ):
        return row
    ratio = forecast[case, recipe] / forecast[case, BF16]
    return {
        **row,
        "forecast": round(ratio, 3),
        "off": round(ratio / row.get("gpu_ratio", row["ratio"]) - 1, 3),
    }


class Process:
    """A stage that runs. Its rows are put into a queue with its name; None at its end."""

    def __init__(
        self, stage: str, device: str, small: bool, rows: queue.Queue[Any]
    ) -> None:
        self.stage, self.begun = stage, time.monotonic()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        command = [sys.executable, "-m", "benchmarks.gpu", "--run", stage, "--device"]
        command += [(stage in FORECASTS and card()) or device]
        environment = dict(os.environ)
        if stage in FORECASTS:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # compiled for, not used
        self._process = subprocess.Popen(
            [*command, *(["--small"] if small else [])],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,  # a signal of the terminal is the parent's
        )
        self._reader = threading.Thread(target=self._read, args=(rows,), daemon=True)
        self._reader.start()

    def _read(self, rows: queue.Queue[Any]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # what else is printed
                    rows.put((self.stage, json.loads(line)))
        rows.put((self.stage, None))

    def end(self, record: Record, why: str = "") -> None:
        """Ends it, if it still runs, with its children."""
        if why:
            self._signal(signal.SIGTERM)
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._reader.join()
        how = why or (
            "done" if self._process.returncode == 0 else f"failed: {self._last_error()}"
        )
        record.end(self.stage, how, time.monotonic() - self.begun)
        self._errors.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"exit code {self._process.returncode}: {(lines or [''])[-1][:300]}"


def run_together(
    stages: Sequence[str], record: Record, until: float, device: str, small: bool
) -> None:
    """Runs stages side by side, until they end or the time has come."""
    rows: queue.Queue[Any] = queue.Queue()
    running = {stage: Process(stage, device, small, rows) for stage in stages}
    try:
        while running:
            try:
                stage, row = rows.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if row is None:
                running.pop(stage).end(record)
            else:
                record.add(stage, row)
                print(stage, json.dumps(row), flush=True)
        for stage in list(running):
            running.pop(stage).end(record, "its time was up")
    finally:
        for process in running.values():
            process.end(record, "interrupted")


def run_all(
    stages: Sequence[str], record: Record, seconds: float, device: str, small: bool
) -> None:
    """Runs stages one after the other, and those of LAST at the end, side by side."""
    end = time.monotonic() + seconds
    groups = [[stage] for stage in stages if stage in RATES]
    groups += [last] if (last := [stage for stage in stages if stage in LAST]) else []
    shares = [max((RATES | LAST)[stage] for stage in group) for group in groups]
    for i, group in enumerate(groups):
        left = end - GRACE - time.monotonic()
        until = time.monotonic() + left * shares[i] / sum(shares[i:])
        run_together(group, record, until, device, small)


def card() -> str:
    """The name of the GPU; "" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main(arguments: list[str] | None = None) -> None:
    """Runs the stages that the arguments name, or all, and writes the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="small sizes, to try the script"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="(%(default)s)")
    parser.add_argument(
        "--out", type=Path, help="(benchmarks/results/gpu.json; else out/gpu.json)"
    )
    parser.add_argument("--run", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("stages", nargs="*", default=[], help=f"of {', '.join(STAGES)}")
    given = parser.parse_args(arguments)
    if given.run:
        for row in STAGES[given.run](
            given.device, Sizes.small() if given.small else Sizes()
        ):
            print(json.dumps(row), flush=True)
        return
    unknown = [stage for stage in given.stages if stage not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; choose of {', '.join(STAGES)}")
    stages = given.stages or list(STAGES)
    if given.device == "cuda" and not card() and set(stages) - set(FORECASTS):
        parser.error("no CUDA device; --device cpu --small shows that the script runs")
    recorded = given.device == "cuda" and not given.small
    path = given.out or (RESULTS if recorded else Path("out")) / "gpu.json"
    with terminable():
        record = Record(path, stages, card() or given.device)
        try:
            run_all(stages, record, given.seconds, given.device, given.small)
        except KeyboardInterrupt:
            print("interrupted")
        for stage in record.values["stages"]:
            rows = [row for row in record.values["rows"] if row["stage"] == stage]
            show(stage, record.values["stages"][stage]["ended"], rows)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
