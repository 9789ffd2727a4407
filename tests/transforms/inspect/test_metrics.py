"""`Metrics` against sums in float64, and what it says of formats against the cast itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fp8
from fp8.formats.format import FORMATS
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
    data = Metrics.from_tensor(torch.zeros(0, 3), ["e4m3"])
    assert all(
        value == 0 for value in [data.mean_abs, data.std, data.rms, data.formats["e4m3"].zero]
    )
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


@pytest.mark.parametrize("format", [f.name for f in FORMATS.values() if f.signed])
def test_losses_are_those_of_the_cast(format: str):
    """Against `fp8.quantize` on values around every threshold, ties and neighbours included."""
    row = FORMATS[format]
    torch.manual_seed(0)
    points = [row.min_subnormal, row.min_normal, row.max]
    x = torch.cat([p * torch.tensor([0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0]) for p in points])
    x = torch.cat([x, row.min_normal - row.min_subnormal * torch.tensor([0.25, 0.5, 0.75, 1.0])])
    x = torch.cat([x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(0.0))])
    x = torch.cat([x[x.isfinite()], torch.zeros(3)])
    x = torch.cat([x, -x, torch.randn(100) * row.min_normal])
    cast = fp8.quantize(x, format).abs()
    losses = Metrics.from_tensor(x, [format]).formats[format]
    subnormal = (cast > 0) & (cast < row.min_normal)
    expected = [(cast == 0) & (x != 0), subnormal, x.abs() > row.max]
    shares = [losses.zero, losses.subnormal, losses.saturated]
    assert shares == [mask.double().mean().item() for mask in expected]
    assert losses.headroom == math.log2(row.max / x.abs().max().item())


def test_losses_of_infinities_zeros_and_scales():
    x = torch.tensor([math.inf, 7.0, math.nan, -math.inf])
    losses = Metrics.from_tensor(x, ["e4m3"]).formats["e4m3"]
    assert (losses.saturated, losses.headroom) == (0.5, 6.0)
    assert Metrics.from_tensor(torch.zeros(2), ["e5m2"]).formats["e5m2"].headroom == math.inf
    with pytest.raises(ValueError, match="'e8m0' is for scales"):
        Metrics.from_tensor(x, ["e8m0"])
