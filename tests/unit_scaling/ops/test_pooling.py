"""Pooling: counts and values."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import unit_scaling.functional as U
from unit_scaling.rules.quadrature import largest_square
from unit_scaling.rules.table import OPS

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def test_largest_of_independent_normals():
    """Closed forms for 2 and 3 numbers; for more, the density of the maximum by a fine sum."""
    assert largest_square(2) == pytest.approx(1.0, rel=1e-9)
    assert largest_square(3) == pytest.approx(1 + math.sqrt(3) / (2 * math.pi), rel=1e-9)
    x = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    for count in (9, 1000):
        share = torch.special.ndtr(x) ** count
        mean = (share.diff() * ((x[1:] + x[:-1]) / 2).square()).sum().item()
        assert largest_square(count) == pytest.approx(mean, rel=1e-7)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("settings", [(3, 2, 1), (2, None, 0), (3, 3, 1), (2, 3, 0), (4, 1, 2)])
def test_pooling_counts_its_outputs(settings, ceil_mode: bool):
    """The factor of the gradient is 1/sqrt(outputs per input), as torch counts outputs."""
    x = torch.randn(1, 1, 11, 8)
    kernel, stride, padding = settings
    y = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)
    args, named = (x, kernel, stride, padding), {"ceil_mode": ceil_mode}
    s = OPS["max_pool2d"].scales(args, named, constraint=None)
    assert s["input"] == pytest.approx((x.numel() / y.numel()) ** 0.5)


def test_pooling_returns_indices():
    x = normal(2, 3, 8)
    values, indices = U.max_pool1d(x, 2, return_indices=True)
    expected, where = F.max_pool1d(x, 2, return_indices=True)
    assert torch.equal(indices, where)
    torch.testing.assert_close(values, expected / largest_square(2) ** 0.5)
    torch.testing.assert_close(U.max_pool1d(x, 2), values)


@pytest.mark.parametrize("stride", [(), []], ids=repr)
def test_an_empty_stride_is_that_of_the_kernel(stride: tuple[()] | list[int]) -> None:
    x = normal(2, 3, 6, 6)
    torch.testing.assert_close(U.avg_pool2d(x, (2, 2), stride, [0]), U.avg_pool2d(x, 2, 2))
    torch.testing.assert_close(U.avg_pool1d(x[0], [2], stride), U.avg_pool1d(x[0], 2, 2))
    for library in (F, U):
        with pytest.raises(RuntimeError, match="stride must be greater than zero"):
            library.max_pool1d(x[0], 2, 0)
    with pytest.raises(TypeError, match="divisor_override"):
        U.avg_pool1d(x[0], 2, divisor_override=3)
