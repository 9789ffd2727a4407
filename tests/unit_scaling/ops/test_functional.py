"""Products, activations, norms, embeddings, residual branches, pools: edge cases and values."""

import math

import pytest
import torch
from torch.nn import functional as F

import unit_scaling.functional as U
from tests.shared import assert_close, assert_same, parametrize, proves, refuses
from unit_scaling.rules.quadrature import largest_square
from unit_scaling.rules.table import OPS

X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 6)
INDICES = torch.tensor([[0, 2], [1, 2]])


def gradient(loss, x):
    (grad,) = torch.autograd.grad(loss, x)
    return grad


# --- products ------------------------------------------------------------------------------


def test_linear_of_an_empty_batch():
    x, w = torch.zeros(0, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    y = U.linear(x, w)
    y.sum().backward()
    assert y.shape == (0, 3)
    assert x.grad.shape == x.shape
    assert not w.grad.any()


def test_matmul_of_vectors_and_broadcast_batches():
    v, m, n = (
        torch.randn(6).double(),
        torch.randn(2, 1, 6, 5).double(),
        torch.randn(3, 4, 6),
    )
    n = n.double()
    for left, right in ((v, v), (v, m), (n, v), (n, m)):
        assert_close(U.matmul(left, right), torch.matmul(left, right) / 6**0.5)
    # the gradient of a matrix that is shared by a batch collects one term from each
    scales = OPS["matmul"].rule(n, torch.randn(6, 3), constraint=None)
    assert scales["right"] == pytest.approx((3 * 4) ** -0.5)


# --- activations and dropout ---------------------------------------------------------------


def test_dropout_in_place():
    z = torch.ones(1000)
    assert U.dropout(z, 0.5, inplace=True) is z
    assert sorted(z.unique().tolist()) == pytest.approx([0.0, 2**0.5])


@parametrize("shape, dim", [((), 0), ((5,), 0), ((4, 5), 1), ((2, 4, 5), 0)])
def test_softmax_without_dim(shape, dim):
    x = torch.randn(shape).double()
    assert_same(U.softmax(x), U.softmax(x, dim))
    assert U.softmax(x, None, torch.float32).dtype == torch.float32


@parametrize("name", "dropout dropout1d dropout2d dropout3d".split())
def test_dropout(name):
    fn, dims = getattr(U, name), int(name[7]) if name[-2:-1].isdigit() else 1
    x = torch.randn(2, 3, *[4] * dims)
    assert_close(fn(x, 0.5, training=False), x)
    assert_close(fn(x, 0.0, training=True), x)
    assert not fn(x, 1.0).any()
    with refuses(r"between 0 and 1, but got -0\.1"):
        fn(x, -0.1)


# --- embedding -----------------------------------------------------------------------------


def test_embedding_forms():
    w = torch.randn(5, 3, requires_grad=True)
    assert U.embedding(torch.zeros(0, 2, dtype=torch.long), w).shape == (0, 2, 3)
    U.embedding(INDICES, w, padding_idx=2).sum().backward()
    assert not w.grad[2].any()
    assert w.grad[0].tolist() == pytest.approx([(5 / 4) ** 0.5] * 3)
    w.grad = None
    U.embedding(INDICES, w, sparse=True).sum().backward()
    assert w.grad.is_sparse
    renormed = U.embedding(INDICES, w.detach().clone() * 10, max_norm=1.0)
    assert renormed.norm(dim=-1).max() <= 1 + 1e-5


# --- residual branches ---------------------------------------------------------------------


@proves("unit-scaling", "skip and residual additions")
def test_residual_branch_equals_its_weighted_sum():
    """split and add together have the gradient of the weighted sum itself."""
    tau, x = 0.3, X.clone().requires_grad_()
    a, b = tau / (1 + tau**2) ** 0.5, 1 / (1 + tau**2) ** 0.5
    y = U.residual_apply(torch.sin, x, tau)
    assert_close(y, a * X.sin() + b * X)
    assert_close(gradient(y.sum(), x), a * X.cos() + b)
    branch, _ = U.residual_split(x, 2.0)  # the gradient of one result alone
    assert_close(gradient(branch.sum(), x), torch.full_like(X, 2 / 5**0.5))


def test_residual_add_broadcasts():
    branch, skip = (
        torch.ones(4, 1, requires_grad=True),
        torch.ones(6, requires_grad=True),
    )
    U.residual_add(branch, skip).sum().backward()
    assert branch.grad.tolist() == [[6.0]] * 4
    assert skip.grad.tolist() == [4.0] * 6


@parametrize("tau", [-0.5, float("nan")])
def test_a_branch_of_negative_weight_is_refused(tau):
    for call in (lambda: U.residual_split(X, tau), lambda: U.residual_add(X, X, tau)):
        with refuses(f"tau, .* is at least 0, got {tau}"):
            call()


# --- pooling -------------------------------------------------------------------------------


def test_largest_of_independent_normals():
    """Closed forms for 2 and 3 numbers; for more, the density of the maximum by a fine sum."""
    assert largest_square(2) == pytest.approx(1.0, rel=1e-9)
    assert largest_square(3) == pytest.approx(
        1 + math.sqrt(3) / (2 * math.pi), rel=1e-9
    )
    x = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    for count in (9, 1000):
        share = torch.special.ndtr(x) ** count
        mean = (share.diff() * ((x[1:] + x[:-1]) / 2).square()).sum().item()
        assert largest_square(count) == pytest.approx(mean, rel=1e-7)


@parametrize("ceil_mode", [False, True])
@parametrize("settings", [(2, None, 0), (3, 3, 1), (2, 3, 0), (4, 1, 2)])
def test_pooling_counts_its_outputs(settings, ceil_mode):
    """The factor of the gradient is 1/sqrt(outputs per input), as torch counts outputs."""
    x = torch.randn(1, 1, 11, 8)
    kernel, stride, padding = settings
    y = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)
    args, named = (x, kernel, stride, padding), {"ceil_mode": ceil_mode}
    s = OPS["max_pool2d"].scales(args, named, constraint=None)
    assert s["input"] == pytest.approx((x.numel() / y.numel()) ** 0.5)


def test_pooling_returns_indices():
    x = torch.randn(2, 3, 8).double()
    values, indices = U.max_pool1d(x, 2, return_indices=True)
    expected, where = F.max_pool1d(x, 2, return_indices=True)
    assert_same(indices, where)
    assert_close(values, expected / largest_square(2) ** 0.5)
    assert_close(U.max_pool1d(x, 2), values)


@parametrize("stride", [(), []])
def test_an_empty_stride_is_that_of_the_kernel(stride):
    x = torch.randn(2, 3, 6, 6).double()
    assert_close(U.avg_pool2d(x, (2, 2), stride, [0]), U.avg_pool2d(x, 2, 2))
    assert_close(U.avg_pool1d(x[0], [2], stride), U.avg_pool1d(x[0], 2, 2))
    with refuses("divisor_override", TypeError):
        U.avg_pool1d(x[0], 2, divisor_override=3)
