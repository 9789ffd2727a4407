"""The benchmarks of kinds of models and of fine-tuning: their rows, and that they go on where they
were stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fine_tuning, kinds_of_models
from benchmarks.kinds_of_models import PLAIN, UNIT, WAYS, Rate, best_rate, rows, share_of_peak
from fp8.studies.findings import Run
from fp8.studies.proof import REFERENCE
from notebooks.nanogpt.data import load_corpus


def test_the_best_rate_is_a_power_of_two_from_the_start() -> None:
    tried: list[float] = []

    def loss(rate: float) -> float:
        tried.append(rate)
        return abs(math.log2(rate) - 3)  # least at 8

    assert best_rate(loss, 1.0) == (8, 0)
    assert sorted(tried) == [0.5, 1, 2, 4, 8, 16]


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    shares = [share_of_peak(step, 120) for step in range(121)]
    assert shares[11] == max(shares) == 1
    assert shares[120] == pytest.approx(0, abs=1e-12)


def test_the_rows_of_a_model() -> None:
    """Gaps of 0.1, 0.2, 0.3: mean 0.2, standard deviation 0.1."""
    above = {REFERENCE: 0.0, "unit-scaled FP32": 0.15}
    runs = [
        Run(way, seed, [], 1 + seed + above.get(way, 0.1 * (seed + 1)))
        for way in WAYS
        for seed in range(3)
    ]
    rates = {PLAIN: Rate("torch", 0.01), UNIT: Rate("uu", 0.5)}
    found = {row["way"]: row for row in rows("net", rates, runs)}
    assert "gap" not in found["FP32"]
    row = found["unit-scaled FP8"]
    assert (row["lr"], found["FP8, same function"]["lr"]) == (0.5, 0.01)
    assert row["gap"] == pytest.approx(0.2)
    assert row["standard_error"] == pytest.approx(0.1 / math.sqrt(3), abs=1e-4)
    assert row["gap_high"] - row["gap"] == pytest.approx(4.303 * 0.1 / math.sqrt(3), abs=1e-3)
    assert row["met"] is False  # 0.2 is 3.5 standard errors
    assert row["cost_of_fp8"] == pytest.approx(0.05)


def _main(module: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> list[Any]:
    """The rows of a run of a benchmark, whose second run trains nothing."""
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr("benchmarks.common.RESULTS", folder)
    monkeypatch.setattr("sys.argv", [name, f"--out={folder / 'runs.jsonl'}", *more])
    assert module.main() == 0
    return json.loads((folder / f"{name}.json").read_text())["rows"]


def test_kinds_of_models_trains_and_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    one = {"graph network": kinds_of_models.MODELS["graph network"]}
    monkeypatch.setattr(kinds_of_models, "MODELS", one)
    monkeypatch.setattr(kinds_of_models, "best_rate", lambda loss, start: (start, start))
    arguments = (kinds_of_models, monkeypatch, tmp_path, "--steps=2", "--seeds=0,1")
    found = _main(*arguments)
    assert [row["way"] for row in found] == ["FP32", *list(WAYS)[1:]]
    assert len({tuple(row["losses"]) for row in found}) == len(WAYS)  # each is a way of its own
    monkeypatch.setattr(kinds_of_models, "held_out", None)
    assert _main(*arguments) == found


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
