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
    assert report.notes[-1] == f"level {level} by fp8.initialize, not by MS-AMP: not installed"
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
        fp8.report(model).notes[-1].endswith("it takes AdamW for Adam under this version of torch")
    )
    assert fp8.report(other).notes[-1].endswith("it has O3 for DeepSpeed only")


def test_a_broken_one_is_said_to_be(model, monkeypatch, tmp_path):
    body = "raise RuntimeError('libmsamp_dist.so is missing')"
    (tmp_path / "msamp.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    msamp.initialize(model, torch.optim.Adam(model.parameters()), "O2")
    assert "RuntimeError: libmsamp_dist.so is missing" in fp8.report(model).notes[-1]


@pytest.mark.proves("MS-AMP", "msamp.initialize", how="own")
def test_use_te_is_passed_on_or_leaves_the_products(model, library, monkeypatch):
    """By position too, as in MS-AMP: the fourth argument."""
    optimizer = torch.optim.Adam(model.parameters())
    msamp.initialize(model, optimizer, "O2", True)
    assert library == [(optimizer, "O2", True)]
    monkeypatch.setitem(sys.modules, "msamp", None)
    msamp.initialize(model, optimizer, "O2", use_te=True)
    assert [row.why for row in fp8.report(model) if row.why.startswith("tensor")] == []
    assert isinstance(model[0].weight, fp8.ScaledTensor)


@pytest.mark.parametrize("level", [None, "O1", "O2", "O3"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_clip_grad_norm(model, level, norm_type):
    optimizer = torch.optim.Adam(model.parameters())
    if level is not None:
        msamp.initialize(model, optimizer, level)
    model(torch.randn(16, 32)).square().sum().backward()
    wide = [p.grad.to(torch.float32).clone() for p in model.parameters()]
    expected = torch.stack([g.norm(norm_type) for g in wide]).norm(norm_type)
    for max_norm in (0, -1.0, 2 * expected):  # MS-AMP's: 0 and less do not clip
        norm = msamp.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for p, g in zip(model.parameters(), wide, strict=True):
        assert torch.equal(p.grad.to(torch.float32), g)
    norm = msamp.clip_grad_norm_(iter(list(model.parameters())), expected / 4, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for p, g in zip(model.parameters(), wide, strict=True):
        torch.testing.assert_close(p.grad.to(torch.float32), g / 4, rtol=1e-4, atol=1e-6)


def test_clip_grad_norm_of_what_is_not_finite_and_of_msamps_tensors(model, library):
    model(torch.randn(16, 32) * torch.inf).sum().backward()
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        msamp.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    calls = []
    sys.modules["msamp"].clip_grad_norm_ = lambda *args: calls.append(args) or torch.tensor(3.0)
    theirs = types.SimpleNamespace(grad=object())  # its parameters and gradients are no tensors
    assert msamp.clip_grad_norm_([theirs], 1.0) == 3.0
    assert calls == [([theirs], 1.0, 2.0, False)]
