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
from benchmarks.gpu_stages import STAGES, Sizes
from fp8.lab.hardware import BF16

ROOT = Path(__file__).parents[1]
SMALL = Sizes.small()
PARTS = ("block", "readout")


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


def test_torchao_runs_in_a_process_of_its_own(tmp_path: Path):
    """Whose conversion changes inductor for the whole process. bf16 counts once in a model."""
    out = tmp_path / "gpu.json"
    record = gpu.Record(out, [], "cpu")
    gpu.run_all(["nanochat torchao"], record, 300.0, "cpu", small=True)
    rows = json.loads(out.read_text())["rows"]
    assert {row["case"] for row in rows} == {"linear", "head"}
    assert {row["recipe"].partition(" ")[0] for row in rows} == {"torchao"}
    assert not [row for row in rows if "error" in row]
    assert {f"{stage} torchao" for stage in ("nanochat", "block", "model")} <= STAGES.keys()
    assert set(STAGES) == {*gpu.RATES, *gpu.LAST}
    assert sum(gpu.RATES.values()) + max(gpu.LAST.values()) <= gpu.SECONDS
    ours, theirs = (
        [{"recipe": r, "ms": ms, "times_in_model": 2} for r, ms in times.items()]
        for times in ({BF16: 1.0, "tensor": 0.5}, {"torchao tensorwise": 0.25})
    )
    rows = [{"stage": f"forecast {case}", "case": case, **row} for case in PARTS for row in ours]
    rows += [
        {"stage": f"forecast {case} torchao", "case": case, **row}
        for case in PARTS
        for row in theirs
    ]
    rows += [{"stage": "model", "case": "model", "recipe": "torchao tensorwise", "ratio": 0.5}]
    assert gpu.with_forecasts(rows)[-1]["forecast"] == 0.25
    without = [row for row in rows if row["stage"] != "forecast readout torchao"]
    assert "forecast" not in gpu.with_forecasts(without)[-1]
