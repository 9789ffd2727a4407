"""The benchmarks that train: their rows, and that they go on where they were stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fp8
from benchmarks import defaults, one_line, recipe_loss, sizes
from benchmarks.one_line import WAYS

TINY = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 2}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`run(benchmark, arguments)`: its rows, by its main program."""
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)

    def main(module: Any, *arguments: str, record: str = "") -> list[dict[str, Any]]:
        name = module.__name__.rpartition(".")[2]
        out = tmp_path / "runs" / "losses.jsonl"
        monkeypatch.setattr("sys.argv", [name, f"--out={out}", *arguments])
        assert module.main() == 0
        return json.loads((tmp_path / f"{record or name}.json").read_text())["rows"]

    return main


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a few words, again and again. " * 40)
    return path


# One line


def test_one_line_trains_and_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_line, "best_rate", lambda loss, start: start)
    arguments = ("--steps=22", "--seeds=0", "--models=Llama, Trainer")
    found = run(one_line, *arguments)
    assert [row["way"] for row in found] == ["plain AdamW", *list(WAYS)[1:]]
    assert len({tuple(row["losses"]) for row in found}) == len(WAYS)  # each is a way of its own
    monkeypatch.setattr(one_line, "held_out", None)
    assert run(one_line, *arguments) == found


def test_changes_of_the_defaults_train(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "CHANGES", dict(list(defaults.CHANGES.items())[:2]))
    monkeypatch.setattr(sizes, "SHIFTS", (-1.0, 0.0))
    assert len(run(defaults, "--steps=4", "--seeds=0", "--models=graph network")) == 2
    assert len(run(sizes, "--steps=4", "--seeds=0", "--models=2 layers")) == 1


# Recipes by their loss, and fine-tuning


def test_recipes_are_trained_recorded_and_go_on(
    run: Any, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large model, whose record is another one."""
    runs = {"fp32": None} | {name: fp8.RECIPES[name] for name in ("unit", "delayed", "static")}
    monkeypatch.setattr(recipe_loss, "RUNS", runs)
    monkeypatch.setattr(recipe_loss, "LARGE", {**TINY, "iters": 2})
    arguments = (f"--data={text}", "--iters=2", "--seeds=0,1", "--large")
    table = run(recipe_loss, *arguments, record="recipe_loss_large")
    found = {row["name"]: row for row in table}
    assert list(found) == list(runs)
    losses = (text.parent / "runs" / "losses.jsonl").read_text().splitlines()
    assert found["fp32"]["gap"] == found["fp32"]["half"] == 0
    lines = [line for line in losses if '"recipe": "unit"' in line]
    first, second = (json.loads(line)["loss"] for line in lines)
    assert found["unit"]["loss"] == pytest.approx((first + second) / 2, abs=1e-4)
    assert found["unit"]["gap"] != 0

    monkeypatch.setitem(runs, "again", dataclasses.replace(fp8.RECIPES["unit"], name="again"))
    monkeypatch.setattr(recipe_loss, "held_out_loss", None)  # nothing is trained again
    again = run(recipe_loss, *arguments, record="recipe_loss_large")
    assert again == [*table, table[1] | {"name": "again"}]


def test_claims_are_judged_by_paired_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = (
        recipe_loss.Claim("paper", "ours", "fp32", 0.1),
        recipe_loss.Claim("paper", "ours", "fp32"),
    )
    monkeypatch.setattr(recipe_loss, "CLAIMS", claims)

    def verdicts(*gaps: float) -> list[str]:
        found = {("fp32", seed): 2.0 for seed in range(len(gaps))}
        found |= {("ours", seed): 2.0 + gap for seed, gap in enumerate(gaps)}
        found["fp32", len(gaps)] = 1000.0  # without a run to compare it with
        return [row["verdict"] for row in recipe_loss.judged(found)]

    assert verdicts(0.05, 0.06, 0.07) == ["confirmed", "opposite"]
    assert verdicts(-0.05, -0.06, -0.07) == ["confirmed", "confirmed"]
    assert verdicts(0.3, 0.31, 0.32) == ["opposite", "opposite"]
    assert verdicts(-0.3, 0.1, 0.4) == ["not seen", "not seen"]
    assert verdicts(0.1) == []  # one seed has no interval
