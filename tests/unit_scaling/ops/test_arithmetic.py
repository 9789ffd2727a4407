"""Tensors side by side, quotients, powers, variances and cosines: calling forms, values, errors."""

import math
import operator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import unit_scaling.functional as U
from unit_scaling.rules.table import OPS, find_op

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


X, Y = normal(4, 6), normal(4, 6)


# --- side by side --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cat", "stack"])
@pytest.mark.parametrize("dim", [0, -1])
def test_side_by_side_keeps_values_and_gradients(name: str, dim: int):
    plain = getattr(torch, name)
    ours, theirs = ([t.clone().requires_grad_() for t in (X, Y)] for _ in range(2))
    y, expected = getattr(U, name)(ours, dim), plain(theirs, dim=dim)
    assert torch.equal(y, expected)
    given = torch.randn_like(y)
    y.backward(given)
    expected.backward(given)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    assert set(OPS[name].scales((ours,), {}).values()) == {1.0}


def test_side_by_side_as_torch_is_called():
    assert torch.equal(OPS["cat"].call(([X, Y],), {"axis": 1}), torch.cat([X, Y], 1))
    out = torch.empty(8, 6, dtype=torch.float64)
    assert OPS["cat"].call(((X, Y),), {"out": out}, func=torch.concat) is out
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        U.cat([X, Y[:, :2]])


# --- quotients -----------------------------------------------------------------------------

QUOTIENTS = [torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__, operator.truediv]


@pytest.mark.parametrize("func", QUOTIENTS, ids=lambda f: f.__qualname__)
def test_quotient(func):
    op = find_op(func)
    assert torch.equal(op.call((X, 2.0), {}, func=func), X / 2)
    assert torch.equal(op.call((X, Y), {}, func=func, constraint=None), X / Y)
    assert op.scales((X, Y[:1]), {}, func=func, constraint=None)["other"] == 0.5


@pytest.mark.parametrize("func", [Tensor.div_, Tensor.__itruediv__, operator.itruediv])
def test_quotient_in_place(func):
    leaf = X.clone().requires_grad_()
    x = leaf * 1
    y = find_op(func).call((x, Y), {}, func=func)
    assert y is x
    y.sum().backward()
    torch.testing.assert_close(leaf.grad, 1 / Y)


def test_quotient_to_whole_numbers():
    given = {"rounding_mode": "floor"}
    assert torch.equal(OPS["div"].call((X, Y), given), torch.div(X, Y, **given))


# --- powers --------------------------------------------------------------------------------


def test_factors_of_powers():
    """E[x^4] = 3, E[(2x)^2] = 4, E[x^6] = 15, E[(3x^2)^2] = 27; E[exp(m x)^2] = exp(2 m^2)."""
    assert OPS["square"].rule(constraint=None) == pytest.approx({"output": 3**-0.5, "input": 0.5})
    cube = U.pow(X, 3.0, constraint=None)
    torch.testing.assert_close(cube, X**3 * 15**-0.5)
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


# --- variances and cosines -----------------------------------------------------------------

VARIANCES = [
    ((), {}),
    ((1,), {}),
    ((True,), {}),
    ((0, False), {}),
    ((1, True, True), {}),
    (((0, 1),), {"correction": 2, "keepdim": True}),
    ((), {"unbiased": False}),
]


@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize(("args", "named"), VARIANCES)
def test_variance(name: str, args: tuple, named: dict):
    plain = getattr(torch, name)
    op = find_op(plain)
    scale = op.scales((X, *args), named)["output"]
    assert 0.5 < scale < 1.2
    torch.testing.assert_close(op.call((X, *args), named), plain(X, *args, **named) * scale)


def test_a_statistic_keeps_its_value():
    for name in ("var", "std"):
        for settings in ({}, {"dim": 1, "keepdim": True}):
            assert OPS[name].rule(X, **settings) == {"output": 1.0, "input": 1.0}
        assert OPS[name].rule(X, dim=1, constraint=None)["input"] > 2


def test_one_vector_against_many():
    """It collects the gradient of each: 1/sqrt(copies) less for it, and the rest as it was."""
    one, many = normal(1, 64), normal(900, 64)
    given = [t.clone().requires_grad_() for t in (one, many)]
    y = U.cosine_similarity(*given, constraint=None)
    torch.testing.assert_close(y, F.cosine_similarity(one, many) * 8)
    y.backward(normal(900))
    for t in given:
        assert t.grad.square().mean().sqrt() == pytest.approx(1, abs=5 / (2 * 64) ** 0.5)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "addcmul", "lerp"])
@pytest.mark.parametrize("constraint", ["gmean", "hmean", None])
def test_the_rule_of_broadcast_operands_is_applied(name: str, constraint: str | None):
    """The factor of the output, which a constraint ties to those of the gradients."""
    terms = 3 if name in ("addcmul", "lerp") else 2
    given = [normal(4, 8), normal(8), normal(8)][:terms]
    op = OPS[name]
    factor = op.rule(*given, constraint=constraint)["output"]
    expected = getattr(torch, name)(*given) * factor
    torch.testing.assert_close(op.fn(*given, constraint=constraint), expected)
