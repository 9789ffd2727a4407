"""The benchmark of recipes by their loss: its rows, and that it goes on where it was stopped."""

from __future__ import annotations

import dataclasses
import json

import pytest

import fp8
from benchmarks import recipe_loss


@pytest.mark.parametrize("suffix", ["", "_large"])
def test_the_benchmark_trains_records_and_goes_on(tmp_path, monkeypatch, suffix):
    runs = {"fp32": None} | {name: fp8.RECIPES[name] for name in ("unit", "delayed", "static")}
    monkeypatch.setattr(recipe_loss, "RUNS", runs)
    tiny = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 2}
    monkeypatch.setattr(recipe_loss, "LARGE" if suffix else "SIZE", {**tiny, "iters": 2})
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again. " * 40)
    out = tmp_path / "runs" / "losses.jsonl"
    arguments = ["recipe_loss", f"--data={text}", "--iters=2", "--seeds=0,1", f"--out={out}"]
    monkeypatch.setattr("sys.argv", arguments + ["--large"] * bool(suffix))
    assert recipe_loss.main() == 0
    result = tmp_path / f"recipe_loss{suffix}.json"
    rows = {row["name"]: row for row in json.loads(result.read_text())["rows"]}
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

    monkeypatch.setitem(runs, "again", dataclasses.replace(fp8.RECIPES["unit"], name="again"))
    monkeypatch.setattr(recipe_loss, "held_out_loss", None)  # nothing is trained again
    assert recipe_loss.main() == 0
    table = json.loads(result.read_text())["rows"]
    assert table[-1] == table[1] | {"name": "again"}


def test_claims_are_judged_by_the_interval_of_paired_differences(monkeypatch):
    claims = (
        recipe_loss.Claim("paper", "ours", "fp32", 0.1),
        recipe_loss.Claim("paper", "ours", "fp32"),
    )
    monkeypatch.setattr(recipe_loss, "CLAIMS", claims)

    def verdicts(*gaps: float) -> list[str]:
        found = {("plain", "fp32", seed): 2.0 for seed in range(len(gaps))}
        found |= {("plain", "ours", seed): 2.0 + gap for seed, gap in enumerate(gaps)}
        found["plain", "fp32", len(gaps)] = 1000.0  # without a run to compare it with
        return [row["verdict"] for row in recipe_loss.judged(found)]

    assert verdicts(0.05, 0.06, 0.07) == ["confirmed", "opposite"]
    assert verdicts(-0.05, -0.06, -0.07) == ["confirmed", "confirmed"]
    assert verdicts(0.3, 0.31, 0.32) == ["opposite", "opposite"]
    assert verdicts(-0.3, 0.1, 0.4) == ["not seen", "not seen"]
    assert verdicts(0.1) == []  # one seed has no interval


def test_rows_of_what_is_finished(tmp_path, monkeypatch):
    """Seeds that only one of two runs has are left out of their difference."""
    monkeypatch.setattr(recipe_loss, "RUNS", {"fp32": None, "unit": fp8.RECIPES["unit"]})
    found = {("plain", "fp32", 0): 2.0, ("plain", "fp32", 1): 3.0, ("plain", "unit", 1): 3.5}
    plain, unit = recipe_loss.rows(found)
    assert plain["plain"] == 2.5
    assert (unit["plain"], unit["plain_gap"], unit["plain_seeds"]) == (3.5, 0.5, 1)
    assert unit["plain_half"] is unit["unit_scaled"] is None
    assert unit["unit_scaled_seeds"] == 0


def test_all_recipes_have_a_run():
    own_sums = {name for name, recipe in fp8.RECIPES.items() if recipe.accumulate is None}
    assert own_sums < recipe_loss.RUNS.keys()
