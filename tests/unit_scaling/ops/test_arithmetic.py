"""Sums, products, powers, reductions and concatenation: values, factors, and what has none.

Integers, numbers to add and statistics are not scaled.
"""

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fp8
import unit_scaling.functional as U
from unit_scaling.rules.table import OPS, find_op

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def counts(*shape: int) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)


X, Y = normal(4, 6), normal(4, 6)
N = counts(4)

# --- integers and numbers ------------------------------------------------------------------

#: What has no factor: ours, torch's, arguments.
UNSCALED = {
    "matmul": (U.matmul, torch.matmul, (counts(2, 3), counts(3, 2))),
    "matmul of vectors": (U.matmul, torch.matmul, (counts(3), counts(3))),
    "matmul of batches": (U.matmul, torch.matmul, (counts(2, 2, 3), counts(2, 3, 4))),
    "linear": (U.linear, F.linear, (counts(2, 3), counts(4, 3), counts(4))),
    "addmm": (U.addmm, torch.addmm, (counts(2, 2), counts(2, 3), counts(3, 2))),
    "addmm with a bias": (U.addmm, torch.addmm, (counts(2), counts(2, 3), counts(3, 2))),
    "weighted addmm": (
        *(partial(f, beta=2, alpha=3) for f in (U.addmm, torch.addmm)),
        (counts(2, 2), counts(2, 3), counts(3, 2)),
    ),
    "einsum": (U.einsum, torch.einsum, ("ij,jk->ki", counts(2, 3), counts(3, 2))),
    "bilinear": (U.bilinear, F.bilinear, (counts(2, 3), counts(2, 2), counts(4, 3, 2))),
    "addcmul": (U.addcmul, torch.addcmul, (N, N, N)),
    "max_pool2d": (U.max_pool2d, F.max_pool2d, (counts(1, 4, 4), 2)),
    "avg_pool1d": (U.avg_pool1d, F.avg_pool1d, (counts(1, 4, 4), 2)),
    "avg_pool2d": (U.avg_pool2d, F.avg_pool2d, (counts(1, 4, 4), 2)),
    "pow": (U.pow, torch.pow, (N, 2)),
    "add": (U.add, torch.add, (N, N)),
    "add a number": (U.add, torch.add, (N, 1)),
    "add integers": (U.add, torch.add, (X, N[:, None])),
    "a number and": (U.add, torch.add, (2.0, X)),
    "times a number": (U.mul, torch.mul, (X, 0.5)),
    "a number minus": (U.sub, torch.sub, (1.0, X)),
    "minus a number": (U.sub, torch.sub, (N, 1)),
    "mul": (U.mul, torch.mul, (N, N)),
    "cumsum": (U.cumsum, torch.cumsum, (N, 0)),
    "sum": (U.sum, torch.sum, (N, 0)),
    "a count": (U.sum, torch.sum, (X > 0, -1)),
    "relu": (U.relu, torch.relu, (-N,)),
    "relu in place": (partial(U.relu, inplace=True), torch.relu_, (-N,)),
    "a mean of all": (U.mean, torch.mean, (X,)),
    "a mean with keepdim": (U.mean, torch.mean, (X, 1, True)),
    "a variance": (U.var, torch.var, (X,)),
}


@pytest.mark.parametrize("name", UNSCALED)
def test_integers_and_numbers_are_not_scaled(name: str) -> None:
    """A factor would make integers floats, or truncate what it makes of them."""
    ours, plain, args = UNSCALED[name]
    result, expected = (f(*copy.deepcopy(args)) for f in (ours, plain))
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


IN_PLACE = [
    *(lambda x, op=op: op(x, 0.5, out=x) for op in (U.add, U.sub, U.mul, U.div)),
    *(lambda x, op=op: op(x, inplace=True) for op in (U.tanh, U.sigmoid)),
]


@pytest.mark.parametrize("write", IN_PLACE)
def test_what_integers_cannot_hold_is_not_written_to_them(write) -> None:
    """As in torch."""
    x = counts(3)
    with pytest.raises(TypeError, match=r"torch.float32 cannot be written .* torch.int64"):
        write(x)
    assert torch.equal(x, counts(3))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_out_is_written_and_may_require_gradients(name: str) -> None:
    op, plain = getattr(U, name), getattr(torch, name)
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    out = torch.empty_like(X)
    assert op(x, y, constraint=None, out=out) is out
    scales = OPS[name].rule(X, Y, constraint=None)
    torch.testing.assert_close(out, plain(X, Y) * scales["output"])
    (grad,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(plain(x, y).sum(), x)
    torch.testing.assert_close(grad, expected * scales["input"])


@pytest.mark.parametrize("constraint", ["to_output_scale", None])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_tensor_of_one_element_is_a_number_to_add(
    shape: tuple[int, ...], constraint: str | None
) -> None:
    """It adds to the mean alone, and collects the gradients of all that it is added to."""
    one, x = torch.full(shape, 5.0, requires_grad=True), normal(64, 32).float().requires_grad_()
    grad = normal(64, 32).float()
    for output in (U.add(one, x, constraint), U.sub(x, -one, constraint)):
        torch.testing.assert_close(output, one + x)
        one.grad = x.grad = None
        output.backward(grad)
        torch.testing.assert_close(x.grad, grad)
        collected = grad.sum() if constraint else grad.sum() / (64 * 32) ** 0.5
        torch.testing.assert_close(one.grad, collected.reshape(shape))


def test_sums_of_one_row_are_scaled_as_those_of_many() -> None:
    one = torch.tensor([[1.0]])
    torch.testing.assert_close(U.add(one, one), one * 2**0.5)


# --- dtypes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "func", [torch.dot, torch.vdot, torch.Tensor.vdot, torch.linalg.vecdot, torch.inner]
)
def test_complex_products_are_scaled_as_real_ones_and_conjugated_as_in_torch(func) -> None:
    x, y = torch.complex(normal(2, 16), normal(2, 16))
    result = find_op(func).call((x, y), {}, func=func)
    torch.testing.assert_close(result, func(x, y) / 4)


COMPLEX = {
    "matmul": (torch.matmul, (3, 4), (4, 5)),
    "matmul of batches": (torch.matmul, (2, 3, 4), (2, 4, 5)),
    "linear": (F.linear, (3, 4), (5, 4), (5,)),
    "einsum": (lambda *tensors: torch.einsum("bi,io->bo", *tensors), (3, 4), (4, 5)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", COMPLEX)
def test_gradients_of_complex_products(name: str, enabled: bool, compiled: bool) -> None:
    """Parallel to torch's, which are those of the conjugates; a recipe casts none of it."""
    plain, *shapes = COMPLEX[name]
    operands = [torch.complex(normal(*s), normal(*s)).requires_grad_() for s in shapes]
    expected = plain(*operands)
    grad = torch.randn_like(expected)
    references = torch.autograd.grad(expected, operands, grad)

    def ours(*tensors: Tensor) -> Tensor:
        with fp8.autocast("unit", enabled=enabled):
            if name == "einsum":
                return U.einsum("bi,io->bo", *tensors)
            return U.linear(*tensors) if name == "linear" else U.matmul(*tensors)

    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    result = run(*operands)
    torch.testing.assert_close(result, expected / 2)
    gradients = torch.autograd.grad(result, operands, grad)
    for mine, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(mine, reference * (mine.norm() / reference.norm()))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float64, torch.bfloat16, torch.complex64], ids=str
)
def test_a_bias_of_another_dtype_is_an_error(dtype: torch.dtype) -> None:
    """As in torch; a factor of an integer would have made it a float."""
    x, w, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4).to(dtype)
    for library in (F, U):
        for call in (
            lambda lib=library: lib.linear(x, w, bias),
            lambda lib=library: lib.bilinear(x, x, torch.ones(4, 3, 3), bias),
            lambda lib=library: lib.conv1d(torch.ones(2, 3, 8), torch.ones(4, 3, 3), bias),
        ):
            with pytest.raises((RuntimeError, ValueError), match="type"):
                call()


# --- broadcast operands --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "addcmul", "lerp"])
@pytest.mark.parametrize("constraint", ["gmean", "hmean", None])
def test_the_rule_of_broadcast_operands_is_applied(name: str, constraint: str | None):
    """The factor of the output, which a constraint ties to those of the gradients."""
    terms = 3 if name in ("addcmul", "lerp") else 2
    operands = [normal(4, 8), normal(8), normal(8)][:terms]
    op = OPS[name]
    factor = op.rule(*operands, constraint=constraint)["output"]
    expected = getattr(torch, name)(*operands) * factor
    torch.testing.assert_close(op.fn(*operands, constraint=constraint), expected)


def test_a_broadcast_operand_collects_gradients():
    gain = Y[0].clone().requires_grad_()
    U.mul(X, gain, constraint=None).sum().backward()
    torch.testing.assert_close(gain.grad, X.sum(0) / 2)
    assert OPS["div"].rule(X, Y[:1], constraint=None)["other"] == 0.5


def test_one_vector_against_many():
    """It collects the gradient of each: 1/sqrt(copies) less for it, and the rest as it was."""
    one, many = normal(1, 64), normal(900, 64)
    leaves = [t.clone().requires_grad_() for t in (one, many)]
    y = U.cosine_similarity(*leaves, constraint=None)
    torch.testing.assert_close(y, F.cosine_similarity(one, many) * 8)
    y.backward(normal(900))
    for t in leaves:
        assert t.grad.square().mean().sqrt() == pytest.approx(1, abs=5 / (2 * 64) ** 0.5)


# --- concatenation -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cat", "stack"])
@pytest.mark.parametrize("dim", [0, -1])
def test_concatenation_keeps_values_and_gradients(name: str, dim: int):
    plain, ours_of = getattr(torch, name), getattr(U, name)
    ours, theirs = ([t.clone().requires_grad_() for t in (X, Y)] for _ in range(2))
    y, expected = ours_of(ours, dim), plain(theirs, dim=dim)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    assert set(OPS[name].scales((ours,), {}).values()) == {1.0}
    for function in (ours_of, plain):
        with pytest.raises(TypeError, match="tuple of Tensors"):
            function(torch.ones(2, 3))


# --- powers and bounds ---------------------------------------------------------------------


def test_factors_of_powers():
    """E[x^4] = 3, E[(2x)^2] = 4, E[x^6] = 15, E[(3x^2)^2] = 27; E[exp(m x)^2] = exp(2 m^2)."""
    assert OPS["square"].rule(constraint=None) == pytest.approx({"output": 3**-0.5, "input": 0.5})
    torch.testing.assert_close(U.pow(X, 3.0, constraint=None), X**3 * 15**-0.5)
    assert OPS["exp"].rule(4.7)["output"] == pytest.approx(4.7 * math.exp(-(4.7**2)))
    assert OPS["pow"].rule(3, None) == pytest.approx({"output": 15**-0.5, "input": 27**-0.5})


@pytest.mark.parametrize(("exponent", "why"), [(0.5, "not finite at"), (-1, "second moment")])
def test_powers_that_a_normal_number_does_not_have(exponent: float, why: str):
    with pytest.raises(ValueError, match=f"pow cannot be unit-scaled: {why}"):
        U.pow(X, exponent)


def test_bounds_are_kept():
    """As a function clamp has a factor; in a model it guards, and stays as it is."""
    assert find_op(torch.clamp) is None
    factor = OPS["clamp"].rule(min=0.0)["output"]
    assert factor == pytest.approx(2**0.5)
    torch.testing.assert_close(U.clamp(X, min=0.0), X.relu() * factor)
    with pytest.raises(TypeError, match="settings of clamp are numbers and strings, got a tensor"):
        U.clamp(X, min=Y)


# --- statistics ----------------------------------------------------------------------------


def test_a_statistic_keeps_its_value():
    for name in ("var", "std", "sum", "mean"):
        assert OPS[name].rule(X, dim=1, keepdim=True) == {"output": 1.0, "input": 1.0}
        assert OPS[name].rule(X) == {"output": 1.0, "input": 1.0}
    for name in ("var", "std"):
        s = OPS[name].rule(X, dim=1, constraint=None)
        assert 0.5 < s["output"] < 1.2
        assert s["input"] > 2


def test_a_mean_of_everything_is_a_loss():
    """Its value is kept, and without constraint its gradient is that of the sum."""
    x = X.clone().requires_grad_()
    loss = U.mean(x, constraint=None)
    assert torch.equal(loss, X.mean())
    loss.backward()
    torch.testing.assert_close(x.grad, torch.ones_like(X))
