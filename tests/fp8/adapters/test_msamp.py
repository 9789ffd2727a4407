"""MS-AMP's call: by the library where it can be imported, which it cannot here, else by ours."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import fp8
from fp8.adapters import msamp


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Something to import, with the signature of MS-AMP 0.4; the calls that it gets."""
    calls: list[Any] = []

    def initialize(
        model: Any, optimizer: Any = None, opt_level: str = "O1", use_te: bool = False
    ) -> Any:
        calls.append((optimizer, opt_level, use_te))
        return model, optimizer

    module = types.ModuleType("msamp")
    module.initialize = initialize
    monkeypatch.setitem(sys.modules, "msamp", module)
    return calls


@pytest.mark.proves("MS-AMP", "msamp.initialize", how="own")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_ours_where_there_is_none(model, level):
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = msamp.initialize(model, optimizer, level, recipe="tensor")
    report = fp8.report(model)
    assert report.notes == [f"level {level} by fp8.initialize, not by MS-AMP: not installed"]
    assert "not by MS-AMP: not installed\n" in str(report)
    assert report[0].why.startswith("tensor")
    model(torch.randn(16, 32)).square().mean().backward()
    weight = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, weight)


@pytest.mark.proves("MS-AMP", "msamp.initialize", how="own")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_its_own_where_it_can_be_imported(model, library, level):
    optimizer = torch.optim.Adam(model.parameters())
    assert msamp.initialize(model, optimizer, level) == (model, optimizer)
    assert library == [(optimizer, level, False)]
    assert fp8.report(model).notes == [f"level {level} by MS-AMP unknown"]


def test_ours_for_what_it_does_otherwise_than_it_says(model, library):
    """It asks whether an optimizer is an Adam first, which AdamW is by now: L2 in the place of
    decoupled decay. And it has O3 for DeepSpeed only."""
    other = nn.Sequential(nn.Linear(32, 32))
    msamp.initialize(model, torch.optim.AdamW(model.parameters()), "O2")
    msamp.initialize(other, torch.optim.Adam(other.parameters()), "O3")
    assert library == []
    assert (
        fp8.report(model).notes[0].endswith("it takes AdamW for Adam under this version of torch")
    )
    assert fp8.report(other).notes[0].endswith("it has O3 for DeepSpeed only")


def test_a_broken_one_is_said_to_be(model, monkeypatch, tmp_path):
    body = "raise RuntimeError('libmsamp_dist.so is missing')"
    (tmp_path / "msamp.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    msamp.initialize(model, torch.optim.Adam(model.parameters()), "O2")
    assert "RuntimeError: libmsamp_dist.so is missing" in fp8.report(model).notes[0]
