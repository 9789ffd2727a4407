"""benchmarks.codebases on a codebase that is made here; the real ones are what its user has."""

import json

import pytest
import torch
from torch import nn

from benchmarks import codebases
from benchmarks.codebases import DIFF, WAYS, Codebase, Setup, generator
from tests.shared import parametrize, refuses

MODEL = """
from torch import nn, optim

def made():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

def optimizer_of(model, rate):
    optimizer = optim.SGD(
        model.parameters(), lr=rate
    )
    return optimizer
"""

LINES = """
# tiny, clones/tiny, , code
--- train.py
 model = made()
+model = unit_scale(model, batch=x)
+fp8.convert(model)
--- code/tiny_model.py
-    optimizer = optim.SGD(
-        model.parameters(), lr=rate
-    )
+    optimizer = uu.optim.SGD(model.parameters())
"""


def setup(clone):
    import tiny_model  # of the clone

    def batch(number):
        x = torch.randn(64, 8, generator=generator(number))
        return x, x[:, :4].argmax(1)

    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    names = {"x": batch(0)[0], "rate": 0.01}
    return Setup(tiny_model.made(), batch, loss, lambda model: names, clip=1.0)


@pytest.fixture
def run(tmp_path, monkeypatch, one_thread):
    """`run(folder)`: the rows of a folder of clones."""
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)

    def main(at):
        monkeypatch.setattr("sys.argv", ["codebases", f"--at={at}"])
        assert codebases.main() == 0
        return json.loads((tmp_path / "codebases.json").read_text())["rows"]

    return main


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A clone, with its lines in a diff of its own."""
    clone = tmp_path / "clones" / "tiny"
    (clone / "code").mkdir(parents=True)
    (clone / "code" / "tiny_model.py").write_text(MODEL)
    (clone / "train.py").write_text("model = made()\n")
    (tmp_path / "lines.diff").write_text(LINES)
    monkeypatch.setattr(codebases, "DIFF", tmp_path / "lines.diff")
    monkeypatch.setattr(codebases, "SETUPS", {"tiny": setup})
    return clone


def test_the_ways_are_trained_and_resumed(run, tiny, tmp_path):
    (row,) = run(tmp_path)
    assert row["resumed"] == "to the bit"
    assert len({row[way][0] for way in WAYS}) == len(WAYS)  # each is a way of its own
    assert abs(row["FP8"][0] - row["float32"][0]) < 0.05
    assert row["best rate"] > 1
    assert row["float32, best rate"][0] < row["float32"][0]
    (tiny / "train.py").write_text("model = other()\n")
    with refuses(r"train\.py has no line 'model = made\(\)'"):
        run(tmp_path)


def test_what_its_user_lacks_is_skipped(run, tmp_path, capsys):
    assert run(tmp_path) == []
    skipped = capsys.readouterr().out.count(": skipped, ")
    assert skipped == len(Codebase.all(DIFF.read_text())) == 10


@parametrize("way", WAYS)
def test_lines_are_put_into_a_file(way, tiny):
    hunks = Codebase.all(LINES)["tiny"].hunks
    text = hunks[1].applied(hunks[0].applied("model = made()\n" + MODEL, way), way)
    has = {line: line in text for line in ("unit_scale(", "fp8.convert(", "uu.optim.")}
    is_unit = way.startswith("unit_scale")
    assert list(has.values()) == [is_unit, "FP8" in way, is_unit]
    assert ("lr=rate" in text) != is_unit
