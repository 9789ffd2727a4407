"""MS-AMP's functions by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8
from fp8.adapters import msamp


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))


@pytest.mark.proves("MS-AMP", "msamp.initialize", how="own")
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_initialize(model, level):
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = msamp.initialize(model, optimizer, level, recipe="tensor")
    report = fp8.report(model)
    assert report.notes[-1].startswith(f"level {level}: ")
    assert report[0].why.startswith("tensor")
    model(torch.randn(16, 32)).square().mean().backward()
    weight = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, weight)


def test_use_te_leaves_the_products(model):
    """By position too, as in MS-AMP: the fourth argument."""
    msamp.initialize(model, torch.optim.Adam(model.parameters()), "O2", True)
    assert [row.why for row in fp8.report(model) if row.why.startswith("tensor")] == []
    assert isinstance(model[0].weight, fp8.ScaledTensor)


@pytest.mark.parametrize("level", [None, "O3"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_clip_grad_norm(model, level, norm_type):
    optimizer = torch.optim.Adam(model.parameters())
    if level is not None:
        msamp.initialize(model, optimizer, level)
    model(torch.randn(16, 32)).square().sum().backward()
    wide = [p.grad.to(torch.float32).clone() for p in model.parameters()]
    expected = torch.stack([g.norm(norm_type) for g in wide]).norm(norm_type)
    for max_norm, factor in ((0, 1), (-1.0, 1), (2 * expected, 1), (expected / 4, 0.25)):
        parameters = iter(list(model.parameters()))  # 0 and less do not clip
        norm = msamp.clip_grad_norm_(parameters, max_norm, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        for p, g in zip(model.parameters(), wide, strict=True):
            clipped = p.grad.to(torch.float32)
            torch.testing.assert_close(clipped, g * factor, rtol=1e-4 * (factor < 1), atol=1e-6)
    model[1].bias.grad[0] = torch.inf
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        msamp.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
