"""The benchmarks at sizes that say nothing: what they record, what their figures mean, and that
they go on where they were stopped."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8
from benchmarks import one_line, preflight, problems, rates, recipe_loss, transfer
from benchmarks.gpu import Record
from benchmarks.gpu_kernels import TIMES, in_trace
from benchmarks.one_line import WAYS
from benchmarks.strangers.__main__ import by_library, measured
from benchmarks.strangers.case import Stranger, loss_inside
from benchmarks.strangers.examine import examine
from fp8.common.step import tensors
from fp8.lab.hardware import BF16, Hardware, Host
from fp8.lab.preflight.training import loss_of
from notebooks.nanogpt.data import load_corpus
from notebooks.transfer import COMPLETE, ENDS, PARAMETRISATIONS, Experiment, train
from tests.shared import assert_same, filterwarnings, linears, pairs, parametrize

ROOT = Path(__file__).parents[1]

pytestmark = [
    filterwarnings("ignore:AdamW steps:fp8.warnings.OptimizerWarning"),  # a sweep
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
    changed(one_line, search=lambda loss, start, sides: {start: 0.0})
    arguments = ("--steps=22", "--seeds=0", "--models=Llama, Trainer")
    found = run(one_line, *arguments)
    assert [row["way"] for row in found] == ["plain AdamW", *list(WAYS)[1:]]
    assert len({tuple(row["losses"]) for row in found}) == len(
        WAYS
    )  # each is a way of its own
    changed(one_line, held_out=None)
    assert run(one_line, *arguments) == found


def test_changes_of_the_defaults_train(run, changed):
    changed(rates, CHANGES=dict(list(rates.CHANGES.items())[:2]), SHIFTS=(-1.0, 0.0))
    little = ("--steps=4", "--seeds=0")
    rows = run(rates, "defaults", "--models=graph network", *little, record="defaults")
    assert [row["name"] for row in rows] == list(rates.CHANGES)
    assert rows[1]["graph network"] != 0
    (row,) = run(rates, "sizes", "--models=2 layers", *little, record="sizes")
    assert row["2^-1.0"] != row["2^+0.0"]


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


# The learning-rate sweep


@parametrize("name", PARAMETRISATIONS)
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
    names = ("transfer", "transfer_depth")
    records = [run(transfer, f"--data={text_file}", record=name) for name in names]
    changed(transfer, train=None)
    assert run(transfer, f"--data={text_file}") == records[0]
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


@parametrize("name", problems.PROBLEMS)
def test_each_problem_makes_a_step(name):
    """Batches are the same whenever asked, and others for another seed."""
    setups = [problems.PROBLEMS[name](seed) for seed in (1, 1, 2)]
    batches = [next(iter(setup.batches)) for setup in setups]
    first, same, other = (list(tensors(batch)) for batch in batches)
    assert_same(first, same)
    assert not torch.equal(first[0], other[0])
    setup = setups[0]
    loss_of(setup.model, batches[0], setup.loss).backward()
    before = [p.detach().clone() for p in setup.model.parameters()]
    setup.optimizer.step()
    still = [torch.equal(a, b) for a, b in pairs(before, setup.model.parameters())]
    assert sum(still) <= 0.1 * len(still)


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
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", "--small"]
    command += [f"--out={out}", "rates", "linear", "head"]
    process = subprocess.Popen(command, cwd=ROOT)
    rows, end = [], time.monotonic() + 300
    while not (rows and rows[-1]["stage"] == "linear") and time.monotonic() < end:
        time.sleep(0.1)
        if out.exists():
            rows = json.loads(out.read_text())["rows"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    record = json.loads(out.read_text())
    ended = {name: stage["ended"] for name, stage in record["stages"].items()}
    assert ended == {"rates": "done", "linear": "interrupted"}
    hardware = next(r["hardware"] for r in record["rows"] if "hardware" in r)
    Hardware(**hardware | {"host": Host(**hardware["host"])})
    row = next(row for row in record["rows"] if row["stage"] == "linear")
    assert {"case": "linear", "recipe": BF16}.items() <= row.items()
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


def test_kernels_are_those_of_the_later_steps(tmp_path):
    """Two steps of a product and a cast, whose launch calls the driver."""
    grid = {"grid": [4, 2, 1], "block": [128, 1, 1], "registers per thread": 32}
    events = []
    for at, (name, us) in enumerate([("gemm", 9), ("triton_a", 8)] * 2):
        us -= at // 2
        kernel = {"cat": "kernel", "name": name, "ts": at, "dur": us, "args": grid}
        calls = [
            {"cat": f"cuda_{of}", "name": "Launch", "args": {"correlation": at}}
            for of in ("runtime", "driver")
        ]
        events += [kernel, *calls]
    step = in_trace(events, 2)
    assert step.row() == {
        "kernels": 2,
        "launches": 2,
        "triton_ms": 0.007,
        "attention_ms": 0,
        "product_ms": 0.008,
        "other_ms": 0,
    }
    record = Record(tmp_path / "a.json", tmp_path / "b.json", [], "")
    same = {"case": "block", "recipe": "unit"}
    for row in ({"ratio": 1.0}, {TIMES: step.details()}):
        record.add("block", same | row)
    assert record.values["rows"] == [{"stage": "block", **same, "ratio": 1.0}]
    listed = json.loads((tmp_path / "b.json").read_text())
    assert [row["us"] for row in listed] == [8, 7]
    assert {"blocks": 8, "warps": 4, "stage": "block", **same}.items() <= listed[
        0
    ].items()


# Models of other libraries


def _network():
    model = linears(16, 64, nn.GELU, 64, 4)
    return loss_inside(
        model, nn.functional.cross_entropy, torch.randint(4, (32,)), torch.randn(32, 16)
    )


def _broken():
    raise RuntimeError("of its own\nand more")


@filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, with threads
def test_the_rows_of_strangers():
    rows = []
    examine(Stranger("net", "none", _network), rows.append)
    row = rows[-1]
    assert (row["result"], row["inside"], row["agrees"]) == ("runs", True, True)
    assert row["casts"] == 3 * 2 + 3  # operands forward, gradients backward
    assert [row[key] for key in ("unit", "trained", "static")] == [1, 1, 1]
    assert max(row["fp32_fall"], row["fp8_fall"]) < 1
    assert json.loads(json.dumps(row)) == row
    (library,) = by_library([row])
    counts = ("models", "run", "unit", "trained", "static", "agrees", "fp8_fall")
    assert [library[key] for key in counts] == [1] * len(counts)
    row = measured(Stranger("broken", "none", _broken), 60)
    assert row["result"] == "not built: RuntimeError: of its own and more"
