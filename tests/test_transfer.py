"""The learning-rate sweep: its models, its search, its record."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import transfer, transfer_depth
from notebooks.nanogpt.data import load_corpus
from notebooks.transfer import COMPLETE, ENDS, PARAMETRISATIONS, Experiment, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:AdamW steps:fp8.warnings.OptimizerWarning"),  # a sweep
    pytest.mark.usefixtures("one_thread"),  # models this small are slower on several
]
TINY = {"context": 8, "batch_size": 4, "eval_batches": 2}


@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_training(name: str, text_file: Path):
    corpus = load_corpus(str(text_file), context=8)
    data = corpus.train, corpus.val
    experiment = Experiment(vocab=len(corpus.symbols), steps=25, **TINY)
    size = {"width": 32, "layers": 1, "experiment": experiment, "data": data}
    rate = 2**-7 if name == "standard" else 2**-1
    loss = train(name, lr=rate, seed=0, **size)
    assert loss == train(name, lr=rate, seed=0, **size)
    assert loss != train(name, lr=rate, seed=1, **size)
    assert loss < 0.8 * math.log(len(corpus.symbols))
    assert train(name, lr=math.inf, seed=0, **size) == math.inf


def _parabola(name: str, *, width: int, layers: int, lr: float, seed: int, **same: Any) -> float:
    """A loss whose best rate falls with the width in the standard parametrisation alone."""
    assert same.keys() == {"experiment", "data"}
    best = -8 - math.log2(width / 32) if name == "standard" else -1.3
    return 2 + (math.log2(lr) - best) ** 2 + 0.01 * seed


def test_benchmarks(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each writes its record and figure; run again, they train nothing."""
    tiny = {"WIDTHS": (32, 64), "DEPTHS": (1,), "WIDTH": 32, "DEPTH": 1, "SEEDS": (0, 1)}
    for name, value in {**tiny, "train": _parabola}.items():
        monkeypatch.setattr(transfer, name, value)
    for module in (transfer, transfer_depth):
        monkeypatch.setattr(module, "FIGURE", tmp_path / "figure.png")
    monkeypatch.setattr(transfer_depth, "RECORD", tmp_path / "transfer.json")
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["transfer", f"--data={text_file}", f"--out={tmp_path / 'runs.jsonl'}"]
    )

    def run(module: ModuleType) -> list[dict[str, Any]]:
        assert module.main() == 0
        path = tmp_path / f"{module.__name__.removeprefix('benchmarks.')}.json"
        return json.loads(path.read_text())["rows"]

    records = [run(transfer), run(transfer_depth)]
    monkeypatch.setattr(transfer, "train", None)
    assert [run(transfer), run(transfer_depth)] == records
    for name in ("figure.png", "umup-depth.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    found = [(r["name"], r["width"], r["log2_best"], r["moved"]) for rows in records for r in rows]
    assert found == [
        ("standard by width", 32, -8, 0),
        ("standard by width", 64, -9, -1),
        ("u-muP by width", 32, -1.3, 0),
        ("u-muP by width", 64, -1.3, 0),
        ("standard by depth", 32, -8, 0),
        ("u-muP by depth", 32, -1.3, 0),
        (f"{COMPLETE} by depth", 32, -1.3, 0),
        (f"{ENDS} by depth", 32, -1.3, 0),
    ]
