"""Sums, products and concatenation: values, factors, and what has none: integers and numbers."""

import copy
from functools import partial

import torch
from torch.nn import functional as F

import fp8
import unit_scaling.functional as U
from tests.shared import assert_close, assert_same, normals, parametrize, refuses
from unit_scaling.rules.table import OPS, find_op

normal = normals(0)


def counts(*shape):
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)


X, Y = normal(4, 6), normal(4, 6)
N = counts(4)

# --- integers and numbers ------------------------------------------------------------------

#: What has no factor: ours, torch's, arguments.
UNSCALED = {
    "matmul": (U.matmul, torch.matmul, (counts(2, 3), counts(3, 2))),
    "linear": (U.linear, F.linear, (counts(2, 3), counts(4, 3), counts(4))),
    "weighted addmm": (
        *(partial(f, beta=2, alpha=3) for f in (U.addmm, torch.addmm)),
        (counts(2, 2), counts(2, 3), counts(3, 2)),
    ),
    "einsum": (U.einsum, torch.einsum, ("ij,jk->ki", counts(2, 3), counts(3, 2))),
    "max_pool2d": (U.max_pool2d, F.max_pool2d, (counts(1, 4, 4), 2)),
    "avg_pool2d": (U.avg_pool2d, F.avg_pool2d, (counts(1, 4, 4), 2)),
    "add": (U.add, torch.add, (N, N)),
    "add integers": (U.add, torch.add, (X, N[:, None])),
    "a number and": (U.add, torch.add, (2.0, X)),
    "times a number": (U.mul, torch.mul, (X, 0.5)),
    "minus a number": (U.sub, torch.sub, (N, 1)),
    "relu": (U.relu, torch.relu, (-N,)),
    "relu in place": (partial(U.relu, inplace=True), torch.relu_, (-N,)),
}


@parametrize("name", UNSCALED)
def test_integers_and_numbers_are_not_scaled(name):
    """A factor would make integers floats, or truncate what it makes of them."""
    ours, plain, args = UNSCALED[name]
    result, expected = (f(*copy.deepcopy(args)) for f in (ours, plain))
    assert result.dtype == expected.dtype
    assert_same(result, expected)


IN_PLACE = [
    lambda x: U.add(x, 0.5, out=x),
    *(lambda x, op=op: op(x, inplace=True) for op in (U.tanh, U.sigmoid)),
]


@parametrize("write", IN_PLACE)
def test_what_integers_cannot_hold_is_not_written_to_them(write):
    """As in torch."""
    x = counts(3)
    with refuses(r"torch.float32 cannot be written .* torch.int64", TypeError):
        write(x)
    assert_same(x, counts(3))


def test_out_is_written_and_may_require_gradients():
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    out = torch.empty_like(X)
    assert U.add(x, y, constraint=None, out=out) is out
    scales = OPS["add"].rule(X, Y, constraint=None)
    assert_close(out, (X + Y) * scales["output"])
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_close(grad, torch.full_like(X, scales["input"]))


@parametrize("constraint", ["to_output_scale", None])
@parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_is_a_number(shape, constraint):
    """It adds to the mean alone, and collects the gradients of all that it is added to."""
    one, x = (
        torch.full(shape, 5.0, requires_grad=True),
        normal(64, 32).float().requires_grad_(),
    )
    grad = normal(64, 32).float()
    for output in (U.add(one, x, constraint), U.sub(x, -one, constraint)):
        assert_close(output, one + x)
        one.grad = x.grad = None
        output.backward(grad)
        assert_close(x.grad, grad)
        collected = grad.sum() if constraint else grad.sum() / (64 * 32) ** 0.5
        assert_close(one.grad, collected.reshape(shape))


def test_sums_of_one_row_are_scaled_as_those_of_many():
    one = torch.tensor([[1.0]])
    assert_close(U.add(one, one), one * 2**0.5)


# --- dtypes --------------------------------------------------------------------------------


COMPLEX = {
    "dot": (lambda x, y: find_op(torch.dot).call((x, y), {}), torch.dot, (4,), (4,)),
    "linear": (U.linear, F.linear, (3, 4), (5, 4), (5,)),
    "einsum": (
        *(partial(f, "bi,io->bo") for f in (U.einsum, torch.einsum)),
        (3, 4),
        (4, 5),
    ),
}


@parametrize("enabled", [False, True])
@parametrize("name", COMPLEX)
def test_complex_products(name, enabled):
    """Gradients are parallel to torch's, which are those of the conjugates; a recipe casts none."""
    ours, plain, *shapes = COMPLEX[name]
    operands = [torch.complex(normal(*s), normal(*s)).requires_grad_() for s in shapes]
    expected = plain(*operands)
    grad = torch.randn_like(expected)
    with fp8.autocast("unit", enabled=enabled):
        result = ours(*operands)
    assert_close(result, expected / 2)
    pairs = [torch.autograd.grad(y, operands, grad) for y in (result, expected)]
    for mine, reference in zip(*pairs, strict=True):
        assert_close(mine, reference * (mine.norm() / reference.norm()))


@parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16, torch.complex64])
def test_a_bias_of_another_dtype_is_an_error(dtype):
    """As in torch; a factor of an integer would have made it a float."""
    x, w, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4).to(dtype)
    with refuses("type", (RuntimeError, ValueError)):
        U.linear(x, w, bias)
    with refuses("type", (RuntimeError, ValueError)):
        U.conv1d(torch.ones(2, 3, 8), torch.ones(4, 3, 3), bias)


# --- broadcast operands --------------------------------------------------------------------


def test_a_broadcast_operand_collects_gradients():
    gain = Y[0].clone().requires_grad_()
    U.mul(X, gain, constraint=None).sum().backward()
    assert_close(gain.grad, X.sum(0) / 2)
    assert OPS["div"].rule(X, Y[:1], constraint=None)["other"] == 0.5


# --- concatenation -------------------------------------------------------------------------


@parametrize("name", ["cat", "stack"])
@parametrize("dim", [0, -1])
def test_concatenation_keeps_values_and_gradients(name, dim):
    plain, ours_of = getattr(torch, name), getattr(U, name)
    ours, theirs = ([t.clone().requires_grad_() for t in (X, Y)] for _ in range(2))
    y, expected = ours_of(ours, dim), plain(theirs, dim=dim)
    assert_same(y, expected)
    grad = torch.randn_like(y)
    grads = [
        torch.autograd.grad(*each, grad) for each in ((y, ours), (expected, theirs))
    ]
    assert_same(*grads)
    assert set(OPS[name].scales((ours,), {}).values()) == {1.0}
