"""benchmarks/gpu.py, exercised on the CPU at sizes that say nothing about speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_stages
from benchmarks.gpu_stages import Case, Sizes
from docs import questions
from fp8.lab.hardware import BF16, Hardware, Product, estimate

ROOT = Path(__file__).parents[1]
SMALL = Sizes.small()


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
    assert not stages_running(out)


def stages_running(out: Path) -> list[str]:
    """The commands of stages that this test began and that have not ended."""
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            ours = f"OUT={out}" in (process / "environ").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        running += [" ".join(words)] if "--run" in words and ours else []
    return running


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


@pytest.mark.native(whole_graph=True)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's
@pytest.mark.parametrize(("name", "recipes"), [("linear", gpu_stages.recipes()), ("model", [BF16])])
def test_cases_take_a_step(name: str, recipes: list[str]):
    """A layer under each recipe; the other cases are parts of the model, compiled in parts."""
    case = Case(name, *gpu_stages.MODELS[name](SMALL), "cpu")
    for recipe in recipes:
        if gpu_stages.why_not(recipe, "cpu"):
            continue
        compiled = recipe in ("unit", "static", BF16)
        model = case.variant(recipe) if compiled else case.converted(recipe)
        case.step(model)
        assert all(p.grad is None for p in case.model.parameters()), recipe


def test_the_model_has_a_billion_and_a_half_parameters():
    with torch.device("meta"):
        model, _ = gpu_stages.decoder(Sizes())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.5e9, rel=0.05)


def test_forecasts_stand_beside_what_was_measured():
    rows = [
        {"stage": "block", "case": "block", "recipe": "unit", "ratio": 0.8},
        {"stage": "model", "case": "model", "recipe": "unit", "ratio": 0.5},
        {"stage": "model", "case": "model", "recipe": "row", "error": "no kernel"},
    ]
    for case, count in (("block", 3), ("readout", 1)):
        for recipe, ms in ((BF16, 2.0), ("unit", 1.0 if case == "block" else 2.0)):
            row = {"case": case, "recipe": recipe, "ms": ms, "times_in_model": count}
            rows.append({"stage": f"forecast {case}", **row})
    block, model, row, *_ = gpu.with_forecasts(rows)
    assert (block["forecast"], block["off"]) == (0.5, -0.375)
    assert (model["forecast"], model["off"]) == (5 / 8, 0.25)
    assert "forecast" not in row
    assert questions._gpu([block, model, row]) == (
        "block, of bf16's time: unit 0.80 (forecast 0.50); "
        "model, of bf16's time: unit 0.50 (forecast 0.62)"
    )
    assert gpu.with_forecasts(gpu.with_forecasts(rows)) == gpu.with_forecasts(rows)


def test_what_it_refuses(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "conv"])
    assert "unknown stage 'conv'; choose of selftest, rates" in capsys.readouterr().err


@pytest.mark.native
def test_rates_of_this_machine_are_a_row_of_the_roofline():
    """With a clock that says that every call takes a millisecond."""
    measured = gpu_stages.hardware_row("cpu", 64, lambda call: call() is None or 1e-3)
    row = Hardware(**json.loads(json.dumps(measured)))
    assert row.peak == {"bf16": 2 * 64**3 / 1e-3, "fp8": 2 * 64**3 / 1e-3}
    assert row.bandwidth == 2 * 64**2 * 2 / 1e-3
    layer = Product("up", "linear", 1024, 1024, 1024, weight_elements=1 << 20)
    assert estimate([layer], {"up": "tensor"}, row).step > 0
