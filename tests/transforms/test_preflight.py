"""The transform that `fp8.preflight` finds: registered, and trained beside the plain model."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import fp8
from fp8.lab.preflight.demo import GPT, setup
from unit_scaling.transforms.preflight import preserve

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_it_is_registered():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    groups = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    (row,) = groups["fp8.transforms"].items()
    assert EntryPoint(*row, "fp8.transforms").load() is preserve
    assert preserve.recipe == "unit"


def test_the_function_is_kept():
    model, ids = GPT(), torch.randint(256, (2, 9))
    torch.testing.assert_close(preserve(model)(ids), model(ids))


def test_a_preflight_trains_it_with_the_users_optimizer(monkeypatch):
    monkeypatch.setattr("fp8.lab.preflight.preflight.installed", lambda: {"unit_scale": preserve})
    found = fp8.preflight(
        setup, recipes=("unit",), steps=30, budget=1e4, max_seeds=1, progress=False
    ).findings
    runs = {run.name: run for run in found.runs}
    plain, scaled = runs["reference"].losses, runs["unit_scale"].losses
    assert scaled[0] == pytest.approx(plain[0], abs=0.05)  # FP8, and the same function
    assert scaled[-1] == pytest.approx(plain[-1], abs=0.2)
    assert plain[-1] < plain[0] - 1
    (candidate,) = [c for c in found.candidates if c.name == "unit_scale"]
    assert candidate.gap is not None
