"""Pooling and interpolation: counts, values, and compiled as in eager mode."""

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


# Compiled


@pytest.mark.parametrize("settings", [(2,), (2, 2, 1), ((2, 2, 2), [2]), (2, 1), (3,)], ids=str)
def test_compiled_maxima_are_the_eager_ones(settings: tuple):
    """To the bit, with NaN, Inf and ties, in whatever order they are multiplied."""
    torch.compiler.reset()
    x = normal(2, 3, 8, 6, 7).float()
    x[0, 0, 1], x[0, 1, 2], x[1, 2] = torch.nan, torch.inf, 1.0
    results = []
    for pool in (U.max_pool3d, torch.compile(U.max_pool3d, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, *settings)
        y.backward(torch.arange(1.0, y.numel() + 1).view_as(y))
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


def test_compiled_averages_do_not_overflow():
    """Four of 30000 are more than float16 holds. NaN and Inf stay in their window."""
    x = torch.full((1, 1, 8), 30000.0)
    pool = torch.compile(U.adaptive_avg_pool1d, backend="aot_eager", fullgraph=True)
    assert pool(x.half(), 2).tolist() == [[[60000, 60000]]]
    x[..., 0], x[..., 4] = torch.inf, torch.nan
    assert str(pool(x, 4).tolist()) == str(U.adaptive_avg_pool1d(x, 4).tolist())


X = torch.ones(1, 1, 8)
REFUSED = [  # (op, arguments, error, its message), in a graph as in eager code
    (U.avg_pool2d, (X[None], 1, 1, 0, False, True, 0), RuntimeError, "divisor must be not zero"),
    (U.avg_pool1d, (X, 2), TypeError, "divisor_override"),
    (U.lp_pool1d, (X, -1.0, 2), (ValueError, RuntimeError), "norm_type is a positive number"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0].__name__)
def test_what_is_refused_compiled_too(case):
    op, args, error, message = case
    named = {"divisor_override": 3} if op is U.avg_pool1d else {}
    for function in (op, torch.compile(op, backend="aot_eager")):
        with pytest.raises(error, match=message):
            function(*args, **named)


# Interpolation

RESIZED = [("nearest", 1, 3.0), ("linear", 1, 2.5), ("bilinear", 2, 0.5), ("bicubic", 2, 3.0)]
RESIZED += [("area", 2, 0.25), ("trilinear", 3, 2.0), ("nearest-exact", 1, 0.5)]


@pytest.mark.parametrize(("mode", "dims", "factor"), RESIZED)
def test_interpolation_weighs_as_torch_does(mode: str, dims: int, factor: float):
    """Five standard errors of an RMS over the independent inputs."""
    torch.manual_seed(0)
    x = torch.randn(64, 4, *[8] * dims, dtype=torch.float64).requires_grad_()
    y = U.interpolate(x, scale_factor=factor, mode=mode, constraint=None)
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    count = min(x.numel(), y.numel())
    for value in (y, grad):
        assert value.square().mean().sqrt().item() == pytest.approx(1, abs=5 / (2 * count) ** 0.5)


def test_large_sizes_are_measured_in_small():
    big, small = torch.empty(1, 1, 16000, device="meta"), torch.empty(1, 1, 256, device="meta")
    rule = OPS["interpolate"].rule
    s, expected = (rule(x, None, 2.0, "linear", constraint=None) for x in (big, small))
    assert s == pytest.approx(expected)
