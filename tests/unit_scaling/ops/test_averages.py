"""Average pooling in a graph: sums in place of means, and one factor; all pooling as one call."""

import pytest
import torch

import unit_scaling.functional as U
from tests.unit_scaling.ops.test_rows import normal


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"padding": 1},
        {"padding": (0, 0, 0), "count_include_pad": False},
        {"padding": 1, "count_include_pad": False},
        {"ceil_mode": True},
        {"ceil_mode": True, "divisor_override": 5},
        {"divisor_override": -3},
        {"divisor_override": -3, "constraint": "hmean"},
    ],
)
def test_compiled_averages_are_the_eager_ones(settings):
    """A graph has sums in place of means, where all are over the same number, and only there."""
    torch.compiler.reset()
    x, results = normal(2, 3, 9, 9, 9), []
    options = {"constraint": None, **settings}
    for pool in (U.avg_pool3d, torch.compile(U.avg_pool3d, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, 3, 2, **options)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize(
    "settings", [(2,), ([3], [2], (1,)), (3, 1, 1, False, False), (4, None, 0, True), (2, [])]
)
def test_compiled_averages_over_a_line(settings: tuple, batch: tuple):
    torch.compiler.reset()
    x, results = normal(*batch, 3, 17), []
    for pool in (U.avg_pool1d, torch.compile(U.avg_pool1d, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, *settings)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-14, atol=1e-14)


def test_compiled_averages_do_not_overflow():
    """Four of 30000 are more than float16 holds. A divisor of 0 is an error, as in torch."""
    torch.compiler.reset()
    pool = torch.compile(U.avg_pool2d, backend="aot_eager")
    x = torch.full((1, 1, 2, 2), 30000.0, dtype=torch.float16)
    assert pool(x, 2).item() == 60000
    for function in (U.avg_pool2d, pool):
        with pytest.raises(RuntimeError, match="divisor must be not zero"):
            function(x.float(), 2, divisor_override=0)


def test_a_divisor_is_refused_where_torch_has_none():
    """avg_pool1d has no divisor_override, in a graph either, where it is an avg_pool2d."""
    pool = torch.compile(U.avg_pool1d, backend="eager")
    for function in (U.avg_pool1d, pool):
        with pytest.raises(TypeError, match="divisor_override"):
            function(torch.ones(1, 1, 8), 2, divisor_override=3)


@pytest.mark.parametrize("sizes", [4, 1, (2, None, 3), (None, 1, 5), (24, 1, 1)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_compiled_adaptive_averages(sizes, channels_last: bool):
    """Of windows of one size, a graph has the sums; of others what torch has."""
    torch.compiler.reset()
    x, results = normal(2, 3, 12, 4, 15), []
    x = x.to(memory_format=torch.channels_last_3d) if channels_last else x[0]
    op = U.adaptive_avg_pool3d
    for pool in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, sizes, constraint=None)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-14, atol=1e-14)


def test_compiled_adaptive_averages_do_not_overflow():
    """Four of 30000 are more than float16 holds. NaN and Inf stay in their window."""
    pool = torch.compile(U.adaptive_avg_pool1d, backend="aot_eager", fullgraph=True)
    x = torch.full((1, 1, 8), 30000.0)
    assert pool(x.half(), 2).tolist() == [[[60000, 60000]]]
    x[..., 0], x[..., 4] = torch.inf, torch.nan
    assert str(pool(x, 4).tolist()) == str(U.adaptive_avg_pool1d(x, 4).tolist())


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
        assert y.is_contiguous()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


def test_compiled_pools_return_indices_and_name_what_is_wrong():
    torch.compiler.reset()
    x = normal(2, 3, 8)
    pool = torch.compile(U.max_pool1d, backend="aot_eager", fullgraph=True)
    got, expected = (f(x, 2, return_indices=True) for f in (pool, U.max_pool1d))
    torch.testing.assert_close(got, expected)
    for function in (U.lp_pool1d, torch.compile(U.lp_pool1d, backend="aot_eager")):
        with pytest.raises((ValueError, RuntimeError), match="norm_type is a positive number"):
            function(x, -1.0, 2)
