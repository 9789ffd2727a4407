"""Sparse tensors within a model, simulated and measured; their gradients are in test_gradients."""

from __future__ import annotations

import pytest
import torch

import unit_scaling as uu
from tests.transforms.uses import IN, ROWS, USES
from unit_scaling.transforms import simulate_fp8, unit_scale


@pytest.mark.filterwarnings("ignore:Sparse (invariant checks|CSR):UserWarning")
@pytest.mark.filterwarnings("ignore:.*sparse operands have no cast:fp8.warnings.RecipeWarning")
@pytest.mark.parametrize("name", [name for name in USES if "sparse" in name])
def test_simulated_and_verified(name: str) -> None:
    torch.manual_seed(0)
    model, x = unit_scale(USES[name].make()), torch.randn(ROWS, IN)
    simulated = simulate_fp8(model)
    for _ in range(2):
        simulated(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in simulated.parameters() if p.grad is not None)
    assert uu.verify(model, x).share("activation") > 0.7
