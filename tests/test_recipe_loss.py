"""The benchmark of recipes by their loss: its rows, and that it goes on where it was stopped."""

from __future__ import annotations

import json

import pytest

import fp8
from benchmarks import recipe_loss


def test_the_benchmark_trains_records_and_goes_on(tmp_path, monkeypatch):
    runs = {"fp32": None} | {name: fp8.RECIPES[name] for name in ("unit", "delayed", "static")}
    monkeypatch.setattr(recipe_loss, "RUNS", runs)
    monkeypatch.setattr(
        recipe_loss, "SIZE", {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 2}
    )
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again. " * 40)
    out = tmp_path / "runs" / "losses.jsonl"
    arguments = ["recipe_loss", f"--data={text}", "--iters=2", "--seeds=0,1", f"--out={out}"]
    monkeypatch.setattr("sys.argv", arguments)
    assert recipe_loss.main() == 0
    rows = {
        row["name"]: row for row in json.loads((tmp_path / "recipe_loss.json").read_text())["rows"]
    }
    assert list(rows) == list(runs)
    for kind in recipe_loss.MODELS:
        assert rows["fp32"][f"{kind}_gap"] == rows["fp32"][f"{kind}_half"] == 0
        first, second = (
            json.loads(line)["loss"]
            for line in out.read_text().splitlines()
            if f'"{kind}", "recipe": "unit"' in line
        )
        assert rows["unit"][kind] == pytest.approx((first + second) / 2, abs=1e-4)
        assert rows["unit"][f"{kind}_gap"] != 0

    monkeypatch.setitem(runs, "mus", fp8.RECIPES["mus"])  # the casts of "unit"
    monkeypatch.setattr(recipe_loss, "held_out_loss", None)  # nothing is trained again
    assert recipe_loss.main() == 0
    table = json.loads((tmp_path / "recipe_loss.json").read_text())["rows"]
    assert table[-1] == table[1] | {"name": "mus"}


def test_all_recipes_have_a_run():
    own_sums = {name for name, recipe in fp8.RECIPES.items() if recipe.accumulate is None}
    assert own_sums < recipe_loss.RUNS.keys()
    assert [recipe_loss.trained(name) for name in ("mus", "smooth_swiglu", "fog", "fp32")] == [
        *("unit", "delayed", "fog", "fp32")
    ]
