"""The benchmark of gauges and their drift: its models, its rows, its figure."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import drifting, gauges


@pytest.fixture
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "AT", (0, 2, 3))
    monkeypatch.setattr(gauges, "THREADS", 1)
    monkeypatch.setattr(gauges, "FIGURE", tmp_path / "gauges.png")
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    llama = {**gauges.LLAMA, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    monkeypatch.setattr(gauges, "LLAMA", llama)
    tiny = {"BATCH": 4, "CONTEXT": 8, "WIDTH": 16, "SIDE": 8, "NODES": 32, "EDGES": 96}
    for name, size in tiny.items():
        monkeypatch.setattr(drifting, name, size)
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again. " * 100)
    monkeypatch.setattr("sys.argv", ["gauges", f"--data={text}"])


@pytest.mark.usefixtures("_tiny")
def test_the_benchmark_measures_records_and_draws(tmp_path: Path):
    threads = torch.get_num_threads()
    try:
        assert gauges.main() == 0
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "gauges.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "gauges.json").read_text())["rows"]
    rows = {(row["name"], row["of"]): row["details"] for row in found}
    plain = rows["Llama, plain", "gradients"]["step_0"]
    scaled = rows["Llama, unit-scaled", "gradients"]["step_0"]
    assert plain["inside"] == 0
    assert plain["max"] < -3
    assert scaled["inside"] == 1
    for name in ("GPT", "LSTM", "ResNet", "graph network"):
        gradients = rows[name, "gradients"]
        assert list(gradients) == ["step_0", "step_2", "step_3", "recalibrated"]
        assert all(math.isfinite(value) for each in gradients.values() for value in each.values())
        assert gradients["step_0"]["low"] <= gradients["step_0"]["median"]
        assert list(rows[name, "gradients, moved"]) == ["step_2", "step_3"]
        assert rows[f"{name}, plain", "static scales"]["step_0"]["median"] == 0


def test_batches_are_the_same_whenever_asked():
    for batch in (drifting.gratings, drifting.graph):
        first, again, other = batch(3), batch(3), batch(4)
        assert all(map(torch.equal, first, again))
        assert not torch.equal(first[0], other[0])
