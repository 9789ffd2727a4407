"""The transform that `fp8.preflight` finds: registered, and trained beside the plain model."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import fp8
from fp8.lab.preflight.demo import setup
from unit_scaling.transforms.preflight import initialized

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
TRANSFORMS = {"unit_scale": initialized}
INITIALIZED = initialized.label


def test_it_is_registered():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    groups = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    rows = groups["fp8.transforms"].items()
    loaded = {
        name: EntryPoint(name, row, "fp8.transforms").load() for name, row in rows
    }
    assert loaded == TRANSFORMS
    assert initialized.recipe == "static"
    assert INITIALIZED.startswith("unit_scale(model)")


def test_a_preflight_trains_it_with_its_optimizer(monkeypatch):
    monkeypatch.setattr("fp8.lab.preflight.preflight.installed", lambda: TRANSFORMS)
    found = fp8.preflight(
        setup, recipes=("static",), steps=30, budget=1e4, max_seeds=1, progress=False
    ).findings
    runs = {run.name: run.losses for run in found.runs}
    assert runs["reference"][-1] < runs["reference"][0] - 1
    assert runs[INITIALIZED][-1] < runs[INITIALIZED][0] - 1
    gaps = {c.name: c.gap for c in found.candidates}
    assert gaps[INITIALIZED] is not None


def test_an_optimizer_that_its_rate_is_not_for_is_noted(monkeypatch):
    monkeypatch.setattr("fp8.lab.preflight.preflight.installed", lambda: TRANSFORMS)
    made = setup(0)
    sgd = torch.optim.SGD(made.model.parameters(), lr=0.1)
    found = fp8.preflight(
        made.model, made.batches, optimizer=sgd, recipes=("tensor",), steps=4, budget=1e4,
        max_seeds=1, progress=False,
    ).findings  # fmt: skip
    assert any(
        note.startswith(
            f"{INITIALIZED} was not trained: ValueError: unit_scale(model) trains with"
        )
        for note in found.notes
    )
