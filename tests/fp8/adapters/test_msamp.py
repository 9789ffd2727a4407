"""MS-AMP's functions by their names. MS-AMP itself has no distribution and does not import with
this torch: what is called by its own functions is bound to their published signatures."""

import inspect
import sys
import types

import pytest
import torch
from torch import nn

import fp8
from fp8.adapters import msamp
from fp8.common.libraries import LIBRARIES
from tests.shared import assert_close, by_path, parametrize, paths, proves, refuses


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))


def adam(model):
    return torch.optim.Adam(model.parameters())


class ScalingParameter:
    """As that of MS-AMP, no tensor, and without ``dim``."""

    def __init__(self, value):
        self.value, self.grad, self.requires_grad = value, None, True


class FP8Linear(nn.Module):
    def __init__(self, old):
        super().__init__()
        self._parameters["weight"] = ScalingParameter(old.weight.detach().half())
        self.bias = old.bias


CALLS = []


def initialize(model, optimizer=None, opt_level="O1", use_te=False):
    """With the signature of msamp/__init__.py of MS-AMP 0.4.0 (commit 9746ea8)."""
    CALLS.append({"opt_level": opt_level, "use_te": use_te})
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            setattr(model, name, FP8Linear(layer))
    return model, "its optimizer"


def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False):
    """With the signature of msamp/nn/clip_grad.py of MS-AMP 0.4.0 (commit 9746ea8)."""
    CALLS.append(
        {"max_norm": max_norm, "norm_type": norm_type, "error": error_if_nonfinite}
    )
    return torch.tensor(2.0)


@pytest.fixture
def library(monkeypatch):
    """In the place of MS-AMP."""
    module = types.ModuleType("msamp")
    module.initialize, module.clip_grad_norm_ = initialize, clip_grad_norm_
    monkeypatch.setitem(sys.modules, "msamp", module)
    CALLS.clear()
    return module


@proves("MS-AMP", "msamp.initialize", how="signatures")
@parametrize("function", [initialize, clip_grad_norm_])
def test_the_signatures_are_its_own(function):
    ours, theirs = getattr(msamp, function.__name__), function
    found, expected = (
        [(p.name, p.default) for p in inspect.signature(each).parameters.values()]
        for each in (ours, theirs)
    )
    assert found == expected


def test_it_is_called_where_it_imports(model, library):
    optimizer = adam(model)
    result = msamp.initialize(model, optimizer, "O2")
    assert result == (model, "its optimizer")
    assert CALLS == [{"opt_level": "O2", "use_te": False}]
    report = fp8.report(model)
    assert by_path(report, "what", "why") == {"0": ("FP8Linear", "MS-AMP")}
    assert report.notes == ["level O2, by msamp.initialize of MS-AMP unknown"]
    norm = msamp.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert norm == 2
    assert CALLS[1] == {"max_norm": 1.0, "norm_type": 2.0, "error": True}
    for function in (fp8.revert, fp8.convert):
        with refuses("MS-AMP replaced weights of the Sequential"):
            function(model)


def test_what_it_left_is_reported(library):
    model = nn.Sequential(nn.Linear(16, 16), nn.Embedding(4, 16))
    msamp.initialize(model)
    assert by_path(fp8.report(model), "done", "why") == {
        "0": ("converted", "MS-AMP"),
        "1": ("left alone", "MS-AMP does not replace it"),
    }


@proves("MS-AMP", "msamp.initialize")
@parametrize("level", fp8.LEVELS)
def test_ours_is_called_where_it_does_not(model, level):
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = msamp.initialize(model, optimizer, level)
    report = fp8.report(model)
    assert report.notes[0].startswith(f"level {level}: ")
    assert report.notes[1] == "by fp8.initialize; MS-AMP: not installed"
    assert report[0].why.startswith("tensor")
    weight = model[0].weight.detach().to(torch.float32).clone()
    for _ in range(2):
        model(torch.randn(16, 32)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(model[0].weight.to(torch.float32), weight)
    assert isinstance(model[0].weight, fp8.ScaledTensor)


def test_a_broken_library_is_said(model, tmp_path, monkeypatch):
    """As where its NCCL is missing: it raises a RuntimeError when it is imported."""
    (tmp_path / "msamp.py").write_text(
        "raise RuntimeError('libmsamp_dist.so is missing')"
    )
    monkeypatch.delitem(sys.modules, "msamp", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    msamp.initialize(model, opt_level="O1")
    why = "by fp8.initialize; MS-AMP: RuntimeError: libmsamp_dist.so is missing"
    assert fp8.report(model).notes[1] == why


def test_use_te_needs_transformer_engine(model, monkeypatch):
    """By position too, as in MS-AMP: the fourth argument. Nothing has changed."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    with refuses("transformer_engine is", ImportError) as raised:
        msamp.initialize(model, adam(model), "O2", True)
    assert LIBRARIES["transformer_engine"].get in str(raised.value)
    assert type(model[0].weight) is nn.Parameter


def test_use_te_leaves_the_products(te):
    model = nn.Sequential(te.Linear(32, 32, device="cpu"), nn.Linear(32, 32))
    msamp.initialize(model, adam(model), "O2", True)
    assert not paths(fp8.report(model), "converted")
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[1].weight, fp8.ScaledTensor)


@parametrize("level", [None, "O3"])
@parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_clip_grad_norm(model, level, norm_type):
    optimizer = adam(model)
    if level is not None:
        msamp.initialize(model, optimizer, level)
    model(torch.randn(16, 32)).square().sum().backward()
    wide = [p.grad.to(torch.float32).clone() for p in model.parameters()]
    expected = torch.stack([g.norm(norm_type) for g in wide]).norm(norm_type)
    for max_norm, factor in ((-1.0, 1), (expected / 4, 0.25)):  # 0 and less do not clip
        norm = msamp.clip_grad_norm_(iter(model.parameters()), max_norm, norm_type)
        assert_close(norm, expected, rtol=1e-5, atol=0)
        clipped = [p.grad.to(torch.float32) for p in model.parameters()]
        assert_close(clipped, [g * factor for g in wide], rtol=1e-4, atol=1e-6)
    model[1].bias.grad[0] = torch.inf
    with refuses("is non-finite, so it cannot be clipped", RuntimeError):
        msamp.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
