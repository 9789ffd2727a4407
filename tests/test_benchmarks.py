"""The benchmarks at sizes that say nothing: what they record, what their figures mean, and that
they go on where they were stopped."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
from benchmarks import (
    defaults,
    gpu,
    one_line,
    preflight,
    problems,
    recipe_loss,
    sizes,
    transfer,
    transfer_depth,
)
from benchmarks.gpu_stages import STAGES
from benchmarks.one_line import WAYS
from benchmarks.strangers.__main__ import measured, summary
from benchmarks.strangers.case import Stranger, loss_inside
from benchmarks.strangers.casts import SQNR, Casts
from benchmarks.strangers.examine import Options, examine
from fp8.common.step import tensors
from fp8.lab.hardware import BF16
from fp8.lab.preflight.findings import Run
from fp8.lab.preflight.training import loss_of
from notebooks.nanogpt.data import load_corpus
from notebooks.transfer import COMPLETE, ENDS, PARAMETRISATIONS, Experiment, train
from unit_scaling.transforms import simulate_fp8

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:AdamW steps:fp8.warnings.OptimizerWarning"
    ),  # a sweep
    pytest.mark.usefixtures("one_thread"),  # models this small are slower on several
]


@pytest.fixture
def changed(monkeypatch):
    """`changed(module, NAME=value)`: its constants."""

    def change(module, **values):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    return change


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(benchmark, arguments)`: its rows, by its main program."""
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)

    def main(module, *arguments, record=""):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(
            "sys.argv", [name, f"--out={tmp_path / 'runs.jsonl'}", *arguments]
        )
        assert module.main() == 0
        return json.loads((tmp_path / f"{record or name}.json").read_text())["rows"]

    return main


# What trains


def test_one_line_trains_and_goes_on(run, changed):
    changed(one_line, best_rate=lambda loss, start: start)
    arguments = ("--steps=22", "--seeds=0", "--models=Llama, Trainer")
    found = run(one_line, *arguments)
    assert [row["way"] for row in found] == ["plain AdamW", *list(WAYS)[1:]]
    assert len({tuple(row["losses"]) for row in found}) == len(
        WAYS
    )  # each is a way of its own
    changed(one_line, held_out=None)
    assert run(one_line, *arguments) == found


def test_changes_of_the_defaults_train(run, changed):
    changed(defaults, CHANGES=dict(list(defaults.CHANGES.items())[:2]))
    changed(sizes, SHIFTS=(-1.0, 0.0))
    assert len(run(defaults, "--steps=4", "--seeds=0", "--models=graph network")) == 2
    assert len(run(sizes, "--steps=4", "--seeds=0", "--models=2 layers")) == 1


def test_recipes_are_trained_recorded_and_go_on(run, changed, tmp_path):
    """The large model, whose record is another one."""
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again. " * 40)
    tiny = {
        "layers": 1,
        "heads": 2,
        "width": 16,
        "context": 16,
        "batch_size": 2,
        "iters": 2,
    }
    runs = {"fp32": None, "unit": fp8.RECIPES["unit"], "static": fp8.RECIPES["static"]}
    changed(recipe_loss, RUNS=runs, LARGE=tiny)
    arguments = (f"--data={text}", "--iters=2", "--seeds=0,1", "--large")
    table = run(recipe_loss, *arguments, record="recipe_loss_large")
    assert [row["name"] for row in table] == list(runs)
    assert table[0]["gap"] == table[0]["half"] == 0 != table[1]["gap"]
    changed(recipe_loss, held_out_loss=None)  # nothing is trained again
    assert run(recipe_loss, *arguments, record="recipe_loss_large") == table


CLAIMS = [
    ([0.05, 0.06, 0.07], ["confirmed", "opposite"]),
    ([-0.05, -0.06, -0.07], ["confirmed", "confirmed"]),
    ([-0.3, 0.1, 0.4], ["not seen", "not seen"]),
    ([0.1], []),  # one seed has no interval
]


@pytest.mark.parametrize(("gaps", "verdicts"), CLAIMS)
def test_claims_are_judged_by_paired_intervals(changed, gaps, verdicts):
    bounds = ((0.1,), ())
    changed(
        recipe_loss,
        CLAIMS=[recipe_loss.Claim("paper", "ours", "fp32", *b) for b in bounds],
    )
    found = {("fp32", len(gaps)): 1000.0}  # without a run to compare it with
    for seed, gap in enumerate(gaps):
        found |= {("fp32", seed): 2.0, ("ours", seed): 2.0 + gap}
    assert [row["verdict"] for row in recipe_loss.judged(found)] == verdicts


# The learning-rate sweep


@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_a_sweep_trains(name, text_file):
    corpus = load_corpus(str(text_file), context=8)
    tiny = {"context": 8, "batch_size": 4, "eval_batches": 2}
    experiment = Experiment(vocab=len(corpus.symbols), steps=25, **tiny)
    data = corpus.train, corpus.val
    size = {"width": 32, "layers": 1, "experiment": experiment, "data": data}
    rate = 2**-7 if name == "standard" else 2**-1
    loss = train(name, lr=rate, seed=0, **size)
    assert loss < 0.8 * math.log(len(corpus.symbols))
    assert train(name, lr=math.inf, seed=0, **size) == math.inf


def _parabola(name, *, width, layers, lr, seed, **same):
    """A loss whose best rate falls with the width in the standard parametrisation alone."""
    best = -8 - math.log2(width / 32) if name == "standard" else -1.3
    return 2 + (math.log2(lr) - best) ** 2 + 0.01 * seed


def test_sweeps_are_recorded_and_go_on(run, changed, text_file, tmp_path):
    changed(transfer, WIDTHS=(32, 64), DEPTHS=(1,), WIDTH=32, DEPTH=1, SEEDS=(0, 1))
    changed(transfer, train=_parabola, FIGURE=tmp_path / "figure.png")
    record = tmp_path / "transfer.json"
    changed(transfer_depth, RECORD=record, FIGURE=tmp_path / "figure.png")
    modules = (transfer, transfer_depth)
    records = [run(module, f"--data={text_file}") for module in modules]
    changed(transfer, train=None)
    assert [run(module, f"--data={text_file}") for module in modules] == records
    for name in ("figure.png", "umup-depth.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    best = {
        f"{r['name']} {r['width']}": r["log2_best"] for rows in records for r in rows
    }
    standard = [best.pop(name) for name in list(best) if name.startswith("standard")]
    assert standard == [-8, -9, -8]  # by width, and by depth
    assert {f"{COMPLETE} by depth 32", f"{ENDS} by depth 32"} <= set(best)
    assert set(best.values()) == {-1.3}


# Preflights


@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_each_problem_makes_a_step(name):
    """Batches are the same whenever asked, and others for another seed."""
    setups = [problems.PROBLEMS[name](seed) for seed in (1, 1, 2)]
    batches = [next(iter(setup.batches)) for setup in setups]
    first, same, other = (list(tensors(batch)) for batch in batches)
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first[0], other[0])
    setup = setups[0]
    loss_of(setup.model, batches[0], setup.loss).backward()
    before = [p.detach().clone() for p in setup.model.parameters()]
    setup.optimizer.step()
    still = [
        torch.equal(a, b) for a, b in zip(before, setup.model.parameters(), strict=True)
    ]
    assert sum(still) <= 0.1 * len(still)


def test_losses_differ_by_more_than_their_interval():
    held_out = {
        "reference": [1.0, 2.0, 3.0],
        "a": [1.0, 2.0, 3.0],
        "b": [1.1, 2.1, 3.1001],  # above a in every pair
        "c": [0.5, 2.5, 3.1],
        "d": [math.nan, 2.0, 3.0],
    }
    runs = [
        Run(name, i, [], x) for name, of in held_out.items() for i, x in enumerate(of)
    ]
    found = {pair for pair in combinations("abcd", 2) if preflight._differ(runs, *pair)}
    assert found == {("a", "b"), ("a", "d"), ("b", "d"), ("c", "d")}
    assert preflight.difference(runs, "b", "a").mean == pytest.approx(0.1, abs=1e-4)


def test_preflights_are_measured_recorded_and_go_on(run, changed, tmp_path):
    mlp = problems.PROBLEMS["MLP"]
    changed(preflight, PROBLEMS={"MLP": mlp}, SEEDS=(100, 101), MOST_SEEDS=2)
    changed(preflight, STEPS=4, HELD_OUT=2, BUDGET=900.0)
    rows = run(preflight)
    failed = preflight.measure("MLP", lambda seed: (mlp.build(), iter(())), steps=4)
    assert "batches ran out" in preflight.row(failed)["recommended"]
    changed(preflight, measure=None)
    assert run(preflight) == rows
    assert [row["name"] for row in rows] == ["MLP", "all"]
    details = json.loads((tmp_path / "runs.jsonl").read_text())
    assert (
        set(preflight.RECIPES_TRIED) <= set(details["gaps"]) == set(details["errors"])
    )
    assert details["gaps"][details["best"]][0] == min(
        gap[0] for gap in details["gaps"].values()
    )


# On a GPU


def test_rows_are_written_as_they_come_and_stay_after_sigterm(tmp_path):
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--device=cpu",
        "--small",
        f"--out={out}",
    ]
    command += ["rates", "nanochat"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OUT": str(out)})
    rows, end = [], time.monotonic() + 300
    while not (rows and rows[-1]["stage"] == "nanochat") and time.monotonic() < end:
        time.sleep(0.1)
        if out.exists():
            rows = json.loads(out.read_text())["rows"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    record = json.loads(out.read_text())
    ended = {name: stage["ended"] for name, stage in record["stages"].items()}
    assert ended == {"rates": "done", "nanochat": "interrupted"}
    row = next(row for row in record["rows"] if row["stage"] == "nanochat")
    assert {"case": "linear", "recipe": BF16}.items() <= row.items()
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


def test_a_stage_ends_with_its_time_and_a_failure_is_not_the_end(tmp_path):
    """Named stages replace their rows alone. torchao runs in a process of its own."""
    out = tmp_path / "gpu.json"
    record = gpu.Record(out, [], "cpu")
    record.add("rates", {"hardware": {}})
    record.add("selftest", {"recipe": "old"})
    record = gpu.Record(out, ["selftest", "model", "nanochat torchao"], "cpu")
    gpu.run_all(["selftest"], record, gpu.GRACE + 0.5, "cpu", small=True)
    gpu.run_all(["model"], record, 1000.0, "no device", small=True)
    gpu.run_all(["nanochat torchao"], record, 300.0, "cpu", small=True)
    written = json.loads(out.read_text())
    assert {row["stage"] for row in written["rows"]} == {"rates", "nanochat torchao"}
    assert not [row for row in written["rows"] if "error" in row]
    assert written["stages"]["selftest"]["ended"] == "its time was up"
    assert written["stages"]["model"]["ended"].startswith(
        "failed: exit code 1: RuntimeError"
    )
    assert set(STAGES) == {*gpu.RATES, *gpu.LAST}
    assert sum(gpu.RATES.values()) + max(gpu.LAST.values()) <= gpu.SECONDS


def test_a_model_is_forecast_from_its_parts():
    """bf16 counts once in a model; a part that is missing leaves no forecast."""
    rows = []
    for case in ("block", "readout"):
        ours = {"stage": f"forecast {case}", "case": case, "times_in_model": 2}
        theirs = {**ours, "stage": f"forecast {case} torchao"}
        rows.append({**ours, "recipe": BF16, "ms": 1.0})
        rows.append({**theirs, "recipe": "torchao tensorwise", "ms": 0.25})
    whole = {
        "stage": "model",
        "case": "model",
        "recipe": "torchao tensorwise",
        "ratio": 0.5,
    }
    assert gpu.with_forecasts([*rows, whole])[-1]["forecast"] == 0.25
    assert "forecast" not in gpu.with_forecasts([*rows[:-1], whole])[-1]


# Models of other libraries


@pytest.mark.parametrize("scale", [1.0, 2.0**-12, 2.0**12])
def test_the_share_of_casts_is_that_of_operands_in_range(scale):
    """Of a layer in FP8 without scales, whose input needs no gradient: two operands forward, the
    gradient backward."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 64, bias=False)
    nn.init.normal_(layer.weight)
    model = simulate_fp8(layer)
    casts = Casts(model)
    with casts.sampled:
        (model(scale * torch.randn(64, 256)) * torch.randn(64, 64)).sum().backward()
    assert [cast.inside for cast in casts.seen] == [scale == 1, True, True]
    for cast in casts.seen:  # of 2**12 values, each with an error of its own
        assert cast.own == pytest.approx(SQNR[cast.format], abs=0.5)


def _network():
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 4)
    )
    return loss_inside(
        model, F.cross_entropy, torch.randint(4, (32,)), torch.randn(32, 16)
    )


def _broken():
    raise RuntimeError("of its own\nand more")


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # of Python 3.12, with threads
def test_the_rows_of_strangers():
    rows = []
    examine(Stranger("net", "none", _network), Options(train=True), rows.append)
    row = rows[-1]
    assert (row["result"], row["inside"], row["agrees"]) == ("runs", True, True)
    assert row["casts"] == 3 * 2 + 3  # operands forward, gradients backward
    assert [row[key] for key in ("unit", "trained", "static")] == [1, 1, 1]
    assert max(row["fp32_fall"], row["fp8_fall"]) < 1
    assert json.loads(json.dumps(row)) == row
    assert "1 models: 1 runs; unit inside 1 of 1" in summary([row])
    row = measured(Stranger("broken", "none", _broken), Options(), 60)
    assert row["result"] == "not built: RuntimeError: of its own and more"
