"""`Metrics` against sums in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from unit_scaling.transforms import Metrics


def check(data: Metrics.Data, x: Tensor) -> None:
    """Sums of float32 numbers in another order: n * 2**-24 relative, n up to 2**14."""
    x = x.detach().double()
    expected = {
        "mean_abs": x.abs().mean(),
        "abs_mean": x.mean().abs(),
        "std": x.std() if x.numel() > 1 else torch.tensor(0.0),
        "abs_max": x.abs().max(),
        "abs_min": x.abs().min(),
        "rms": x.square().mean().sqrt(),
    }
    for name, value in expected.items():
        assert getattr(data, name) == pytest.approx(value.item(), rel=1e-3, abs=1e-6), name
    assert data.numel == x.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (), (64, 33)])
def test_metrics(dtype: torch.dtype, shape: tuple[int, ...]):
    torch.manual_seed(0)
    x = (100 * torch.randn(shape)).to(dtype)
    check(Metrics.from_tensor(x), x)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_metrics_of_odd_tensors():
    assert Metrics.from_tensor(torch.zeros(0, 3)).numel == 0
    data = Metrics.from_tensor(torch.zeros(0, 3))
    assert all(value == 0 for value in [data.mean_abs, data.std, data.rms])
    assert math.isnan(Metrics.from_tensor(torch.tensor([1.0, math.nan])).rms)
    indices, values = torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    assert Metrics.from_tensor(sparse).mean_abs == 0.75


def test_metrics_have_names():
    first = ["mean_abs", "abs_mean", "std", "abs_max", "abs_min", "numel"]
    assert Metrics.names()[:6] == first
    assert len(Metrics.full_names()) == len(Metrics.names())
    assert Metrics.get_full_name("std") == "standard deviation"
    assert all(hasattr(Metrics.from_tensor(torch.ones(2)), name) for name in Metrics.names())
    with pytest.raises(ValueError, match="unknown metric 'mean'; choose one of 'mean_abs'"):
        Metrics.get_full_name("mean")
    metrics = Metrics(torch.ones(2))
    assert metrics.bwd is None
    metrics.set_bwd(torch.full((2,), 3.0))
    assert metrics.bwd.mean_abs == 3.0
    assert "mean_abs=3.0" in str(metrics)
