"""The transforms that `fp8.preflight` finds: registered, and trained beside the plain model."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import fp8
from fp8.lab.preflight.demo import setup
from unit_scaling.transforms.preflight import initialized, preserve

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
TRANSFORMS = {"unit_scale": preserve, "unit_scale_init": initialized}
PRESERVED, INITIALIZED = preserve.label, initialized.label


def test_they_are_registered():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    groups = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    rows = groups["fp8.transforms"].items()
    loaded = {name: EntryPoint(name, row, "fp8.transforms").load() for name, row in rows}
    assert loaded == TRANSFORMS
    assert (preserve.recipe, initialized.recipe) == ("unit", "unit")
    assert PRESERVED == "unit_scale(init='preserve')"
    assert INITIALIZED.startswith("unit_scale(model)")


def test_a_preflight_trains_them_each_with_its_optimizer(monkeypatch):
    """With init="preserve" the user's, on the same function; else that of `unit_scaling`."""
    monkeypatch.setattr("fp8.lab.preflight.preflight.installed", lambda: TRANSFORMS)
    found = fp8.preflight(
        setup, recipes=("unit",), steps=30, budget=1e4, max_seeds=1, progress=False
    ).findings
    runs = {run.name: run.losses for run in found.runs}
    plain, scaled = runs["reference"], runs[PRESERVED]
    assert scaled[0] == pytest.approx(plain[0], abs=0.05)  # FP8, and the same function
    assert scaled[-1] == pytest.approx(plain[-1], abs=0.2)
    assert plain[-1] < plain[0] - 1
    assert runs[INITIALIZED][-1] < runs[INITIALIZED][0] - 1
    gaps = {c.name: c.gap for c in found.candidates}
    assert gaps[PRESERVED] is not None
    assert gaps[INITIALIZED] is not None


def test_an_optimizer_that_its_rate_is_not_for_is_noted(monkeypatch):
    monkeypatch.setattr(
        "fp8.lab.preflight.preflight.installed", lambda: {"unit_scale_init": initialized}
    )
    made = setup(0)
    sgd = torch.optim.SGD(made.model.parameters(), lr=0.1)
    found = fp8.preflight(
        made.model, made.batches, optimizer=sgd, recipes=("tensor",), steps=4, budget=1e4,
        max_seeds=1, progress=False,
    ).findings  # fmt: skip
    assert any(
        note.startswith(f"{INITIALIZED} was not trained: ValueError: unit_scale(model) trains with")
        for note in found.notes
    )
