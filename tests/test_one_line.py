"""The benchmarks of one line and of fine-tuning: their rows, and that they go on where they were
stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import defaults, fine_tuning, one_line, sizes
from benchmarks.one_line import WARMUP, WAYS, best_rate, rows, share_of_peak
from fp8.lab.preflight.findings import Run
from fp8.lab.preflight.paired_runs import REFERENCE
from notebooks.nanogpt.data import load_corpus


def test_the_best_rate_is_a_power_of_two_from_the_start() -> None:
    tried: list[float] = []

    def loss(rate: float) -> float:
        tried.append(rate)
        return abs(math.log2(rate) - 3)  # least at 8

    assert best_rate(loss, 1.0) == 8
    assert sorted(tried) == [0.5, 1, 2, 4, 8, 16]


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    shares = [share_of_peak(step, 120) for step in range(121)]
    assert shares[WARMUP - 1] == max(shares) == 1
    assert shares[120] == pytest.approx(0, abs=1e-12)


def test_the_rows_of_a_model() -> None:
    """Gaps of 0.02, 0.03, 0.04: mean 0.03, standard deviation 0.01."""
    above = {REFERENCE: 0.0, "unit_scale": 0.015}
    runs = [
        Run(way, seed, [], 1 + seed + above.get(way, 0.01 * (seed + 2)))
        for way in WAYS
        for seed in range(3)
    ]
    found = {row["way"]: row for row in rows("net", 0.01, runs)}
    assert "gap" not in found["plain AdamW"]
    row = found["unit_scale, FP8"]
    assert (row["lr"], found["FP8, same function"]["lr"]) == ("default", 0.01)
    assert row["gap"] == pytest.approx(0.03)
    assert row["gap_high"] - row["gap"] == pytest.approx(4.303 * 0.01 / math.sqrt(3), abs=1e-4)
    assert row["met"] is False
    assert row["cost_of_fp8"] == pytest.approx(0.015)
    assert row["cost_met"] is False
    assert found["unit_scale"]["met"]


def _main(module: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> list[Any]:
    """The rows of a run of a benchmark, whose second run trains nothing."""
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr("benchmarks.common.RESULTS", folder)
    monkeypatch.setattr("sys.argv", [name, f"--out={folder / 'runs.jsonl'}", *more])
    assert module.main() == 0
    return json.loads((folder / f"{name}.json").read_text())["rows"]


def test_one_line_trains_and_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(one_line, "best_rate", lambda loss, start: start)
    more = ("--steps=22", "--seeds=0,1", "--models=Llama, Trainer")
    found = _main(one_line, monkeypatch, tmp_path, *more)
    assert [row["way"] for row in found] == ["plain AdamW", *list(WAYS)[1:]]
    assert len({tuple(row["losses"]) for row in found}) == len(WAYS)  # each is a way of its own
    monkeypatch.setattr(one_line, "held_out", None)
    assert _main(one_line, monkeypatch, tmp_path, *more) == found


def test_one_line_ends_near_plain_training(tmp_path: Path, monkeypatch: Any) -> None:
    """A smoke test of the goal, of one model and one seed; the benchmark has ten and three."""
    monkeypatch.setattr(one_line, "best_rate", lambda loss, start: 2 * start)  # of its sweep
    more = ("--seeds=0", "--models=graph network", "--steps=120")
    found = {r["way"]: r for r in _main(one_line, monkeypatch, tmp_path, *more)}
    assert found["unit_scale"]["gap"] < 0.05
    assert found["unit_scale, FP8"]["gap"] < 0.05


@pytest.mark.parametrize("module", [defaults, sizes])
def test_changes_of_the_defaults_train(module: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(defaults, "CHANGES", dict(list(defaults.CHANGES.items())[:2]))
    monkeypatch.setattr(sizes, "SHIFTS", (-1.0, 0.0))
    model = "graph network" if module is defaults else "2 layers"
    found = _main(module, monkeypatch, tmp_path, "--steps=8", "--seeds=0", f"--models={model}")
    assert len(found) == (2 if module is defaults else 1)


def test_fine_tuning_trains_and_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    size = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 2}
    monkeypatch.setattr("benchmarks.recipe_loss.SIZE", size)
    monkeypatch.setattr(fine_tuning, "BEFORE", 2)
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again. " * 40)
    arguments = (fine_tuning, monkeypatch, tmp_path, f"--data={text}", "--iters=2", "--seeds=0,1")
    found = _main(*arguments)
    assert [row["name"] for row in found] == ["fp32", "static", "tensor", "unit"]
    assert found[0]["losses"] != found[-1]["losses"]
    monkeypatch.setattr(fine_tuning, "trained", None)
    assert _main(*arguments) == found


def test_two_texts_share_their_vocabulary(tmp_path: Path) -> None:
    texts = ("abcab" * 40, "cdxdc" * 40)
    corpora = []
    for i, text in enumerate(texts):
        path = tmp_path / f"{i}.txt"
        path.write_text(text)
        corpora.append(load_corpus(str(path), context=8))
    both = fine_tuning.together(*corpora)
    assert both[0].symbols == both[1].symbols == tuple("abcdx")
    for corpus, text in zip(both, texts, strict=True):
        assert corpus.decode(torch.cat([corpus.train, corpus.val])) == text
