"""The benchmark of preflights: its models and tasks, its figures, its rows."""

from __future__ import annotations

import json
import math
from itertools import combinations, islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import preflight, problems
from benchmarks.preflight import Result
from fp8.common.step import tensors
from fp8.lab.preflight.findings import Run
from fp8.lab.preflight.training import loss_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_each_model_makes_a_step(name: str):
    """Batches and weights are the same whenever asked, and others for another seed."""
    setup, again, other = (problems.PROBLEMS[name](seed) for seed in (1, 1, 2))
    batch, same, different = (list(islice(s.batches, 2)) for s in (setup, again, other))
    assert all(map(torch.equal, _all(batch), _all(same)))
    assert not any(
        torch.equal(a, b) for a, b in zip(_all(batch)[:1], _all(different)[:1], strict=True)
    )
    loss_of(setup.model, batch[0], setup.loss).backward()
    before = [p.detach().clone() for p in setup.model.parameters()]
    assert setup.optimizer is not None
    setup.optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, setup.model.parameters(), strict=True)]
    assert sum(moved) >= 0.9 * len(moved)


def _all(batches: list[object]) -> list[Tensor]:
    return [t for batch in batches for t in tensors(batch)]


def _runs(**held_out: list[float]) -> list[Run]:
    return [Run(n, seed, [], v) for n, values in held_out.items() for seed, v in enumerate(values)]


def test_losses_differ_by_more_than_their_interval():
    runs = _runs(
        reference=[1.0, 2.0, 3.0],
        a=[1.0, 2.0, 3.0],
        b=[1.1, 2.1, 3.1001],  # above a in every pair
        c=[0.5, 2.5, 3.1],
        d=[math.nan, 2.0, 3.0],
    )
    found = {pair for pair in combinations("abcd", 2) if preflight._differ(runs, *pair)}
    assert found == {("a", "b"), ("a", "d"), ("b", "d"), ("c", "d")}
    assert preflight.difference(runs, "b", "a").mean == pytest.approx(0.1, abs=1e-4)


def test_the_benchmark_measures_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With two recipes and few steps; run again it measures nothing."""
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    monkeypatch.setattr(preflight, "PROBLEMS", {"MLP": problems.PROBLEMS["MLP"]})
    monkeypatch.setattr(preflight, "SEEDS", (100, 101))
    for name, value in {"STEPS": 4, "HELD_OUT": 2, "MOST_SEEDS": 2, "BUDGET": 900.0}.items():
        monkeypatch.setattr(preflight, name, value)
    monkeypatch.setattr("sys.argv", ["preflight", f"--out={tmp_path / 'runs.jsonl'}"])
    assert preflight.main() == 0
    rows = json.loads((tmp_path / "preflight.json").read_text())["rows"]
    measure = preflight.measure
    monkeypatch.setattr(preflight, "measure", None)
    assert preflight.main() == 0
    assert json.loads((tmp_path / "preflight.json").read_text())["rows"] == rows
    monkeypatch.setattr(preflight, "measure", measure)
    monkeypatch.setattr(preflight, "exhaustive", None)
    monkeypatch.setattr("sys.argv", ["preflight", "MLP", f"--out={tmp_path / 'runs.jsonl'}"])
    assert preflight.main() == 0  # the recorded comparison is used
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    details, again = map(json.loads, lines)
    assert again["gaps"] == details["gaps"]
    assert [row["name"] for row in rows] == ["MLP", "all"]
    assert set(preflight.RECIPES_TRIED) <= set(details["gaps"]) == set(details["errors"])
    assert details["gaps"][details["best"]][0] == min(gap[0] for gap in details["gaps"].values())
    assert preflight.standing(Result(**details), "error") in ("lower", "not lower")
    for excess, within in (([0.009, 0.008], True), ([0.1, -0.1], True), ([0.02, 0.01], False)):
        assert preflight.is_within(Result("a", excess=excess)) is within


def test_a_model_that_fails_is_a_row():
    def setup(seed: int) -> object:
        return problems.PROBLEMS["MLP"].build(), iter(())

    result = preflight.measure("MLP", setup, steps=4)
    assert "batches ran out" in preflight.row(result)["recommended"]
