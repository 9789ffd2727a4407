"""benchmarks/gpu.py, exercised on the CPU at sizes that say nothing about speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import gpu
from benchmarks.gpu_stages import Sizes
from fp8.lab.hardware import BF16

ROOT = Path(__file__).parents[1]
SMALL = Sizes.small()


def test_rows_are_written_as_they_come_and_stay_after_sigterm(tmp_path: Path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", "--small", f"--out={out}"]
    command += ["rates", "nanochat"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OUT": str(out)})
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        if out.exists() and "nanochat" in {r["stage"] for r in json.loads(out.read_text())["rows"]}:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    record = json.loads(out.read_text())
    assert record["stages"]["rates"]["ended"] == "done"
    assert record["stages"]["nanochat"]["ended"] == "interrupted"
    measured = [row for row in record["rows"] if row["stage"] == "nanochat"]
    assert {"case": "linear", "recipe": BF16}.items() <= measured[0].items()
    assert measured[0]["ratio_low"] <= measured[0]["ratio"] <= measured[0]["ratio_high"]
    assert "error" not in measured[0]


def test_a_stage_ends_with_its_time_and_a_failure_is_not_the_end(tmp_path: Path):
    """Named stages replace their rows alone."""
    out = tmp_path / "gpu.json"
    record = gpu.Record(out, [], "cpu")
    record.add("rates", {"hardware": {}})
    record.add("selftest", {"recipe": "old"})
    record = gpu.Record(out, ["selftest", "model"], "cpu")
    gpu.run_all(["selftest"], record, gpu.GRACE + 0.5, "cpu", small=True)
    gpu.run_all(["model"], record, 1000.0, "no device", small=True)
    written = json.loads(out.read_text())
    assert [row["stage"] for row in written["rows"]] == ["rates"]
    assert written["stages"]["selftest"]["ended"] == "its time was up"
    assert written["stages"]["model"]["ended"].startswith("failed: exit code 1: RuntimeError")
