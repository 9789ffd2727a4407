"""Factors worked out from the function: right, cached, the same compiled, and refused if wrong."""

import math

import pytest
import torch
from torch.nn import functional as F

import unit_scaling as uu
import unit_scaling.functional as U
from tests.shared import Net, assert_close, parametrize, refuses
from unit_scaling.rules.elementwise import elementwise_scales
from unit_scaling.rules.quadrature import normal_means
from unit_scaling.rules.table import OPS

X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 6)
SAMPLES = 100_000

DERIVED = [op for op in OPS.values() if op.rule.__doc__.endswith("by quadrature.")]
each_derived = parametrize("op", DERIVED, ids=lambda op: op.name)


def snake(x, a=1.0):
    return x + torch.sin(a * x).square() / a


# --- the numbers ---------------------------------------------------------------------------


@each_derived
@parametrize("mult", [1.0, 0.3, 4.7])
def test_factors_agree_with_monte_carlo(op, mult):
    """The mean of n squares has a standard error of std / sqrt(n): five of them.

    The quadrature itself is right to 1e-10, which shows where all squares are equal.
    """
    if op.name == "exp" and mult > 1:
        pytest.skip("its moments are those of numbers that no sample has")
    x = torch.randn(SAMPLES, dtype=torch.float64).requires_grad_()
    y = op.fn(x, mult, None)
    (dx,) = torch.autograd.grad(y.sum(), x)
    for value in (y.detach(), dx):
        squares = value.square()
        error = squares.std().item() / math.sqrt(SAMPLES)
        assert abs(squares.mean().item() - 1) < 5 * error + 1e-9, (
            squares.mean(),
            error,
        )


SQRT_PI = math.sqrt(2 * math.pi)
EXACT = {  # mean square of the output and of the derivative
    "cube": (lambda x: x**3, 15, 27),
    "relu": (torch.relu, 1 / 2, 1 / 2),
    "relu squared": (lambda x: x.relu().square(), 3 / 2, 2),
    # a jump away from the edges of the panels: P(x > t), E[x^2; x > t] = t phi(t) + P(x > t)
    "kink at 1/3": (
        lambda x: (x - 1 / 3).relu(),
        (1 + 1 / 9) * math.erfc(1 / 3 / 2**0.5) / 2 - math.exp(-1 / 18) / 3 / SQRT_PI,
        math.erfc(1 / 3 / 2**0.5) / 2,
    ),
    "gaussian": (lambda x: torch.exp(-(x**2)), 5**-0.5, 4 / 5**1.5),
}


@parametrize("case", EXACT)
def test_quadrature_is_exact_to_nine_digits(case):
    fn, output, derivative = EXACT[case]
    s = elementwise_scales(fn, constraint=None)
    assert s["output"] == pytest.approx(output**-0.5, rel=1e-9)
    assert s["input"] == pytest.approx(derivative**-0.5, rel=1e-9)


def test_mult_and_positional_settings():
    """The mult of a homogeneous function changes nothing; a step function takes one factor."""
    assert_close(U.relu(X, mult=3.3), U.relu(X))
    leaky = U.leaky_relu(X, 1.0, None, 0.5)
    assert_close(U.leaky_relu(X, 0.2, negative_slope=0.5), leaky)
    clipped = U.hardtanh(X, 1.0, None, max_val=2.0, min_val=-2.0)
    assert_close(U.hardtanh(X, 1.0, None, -2.0, 2.0), clipped)
    s = elementwise_scales(torch.sign, mult=2.0, constraint=None)
    assert s == {"output": 2.0, "input": 2.0}


# --- unit_scaled ---------------------------------------------------------------------------


def test_decorator_settings_and_mult():
    scaled = uu.unit_scaled(snake)
    assert scaled.__name__ == "snake"
    s = elementwise_scales(snake, (0.5,), {}, 2.0)["output"]
    expected = s * snake(2 * X, 0.5) / 2
    assert_close(scaled(X, 0.5, mult=2.0), expected)
    assert_close(scaled(X, a=0.5, mult=2.0), expected)
    x = X.clone().requires_grad_()
    scaled(x, 0.5, mult=2.0, constraint=None).sum().backward()
    plain = X.clone().requires_grad_()
    snake(2 * plain, 0.5).div(2).sum().backward()
    s = elementwise_scales(snake, (0.5,), {}, 2.0, None)["input"]
    assert_close(x.grad, plain.grad * s)


def test_settings_of_a_compiled_function_are_seen():
    scaled = uu.unit_scaled(lambda x, a=1.0, b=1.0: torch.tanh(a * x) / b)

    def model(x, a, b, mult):
        return scaled(x, a, b=b, mult=mult) + scaled(x, a=1.3, constraint=None)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for settings in [
        (1.0, 1.0, 1.0),
        (2.0, 1.5, 1.0),
        (0.5, 2.0, 3.0),
        (1.0, 1.0, 1.0),
    ]:
        assert_close(compiled(X, *settings), model(X, *settings))


def test_worked_out_outside_of_the_callers_modes():
    """While a program is exported its tensors have no values, under vmap they are batches."""

    model = Net(lambda m, x: uu.unit_scaled(torch.erfc)(x))
    exported = torch.export.export(model, (X,), strict=False)
    assert_close(exported.module()(X), model(X))
    derivative = torch.func.vmap(torch.func.grad(uu.unit_scaled(torch.cos)))(
        X.flatten()
    )
    assert_close(derivative, -X.flatten().sin() * OPS["cos"].rule()["input"])


REFUSED = {
    "softmax": (
        lambda x: x.softmax(-1),
        "not an elementwise function: its value at a point",
    ),
    "dropout": (F.dropout, "or is random"),
    "positions": (
        lambda x: x + torch.ones(3),
        "not an elementwise function: The size of tensor",
    ),
    "log": (torch.log, "log cannot be unit-scaled: not finite at -"),
    "reciprocal": (torch.reciprocal, "second moment infinite around 0"),
    "constant": (lambda x: x * 0 + 1, "constant from -6 to 6"),
    "far": (lambda x: F.threshold(x, 20.0, 0.0), "constant from -6 to 6"),
    "detached": (lambda x: x.detach(), "its output has no gradient"),
    "growth": (lambda x: torch.exp(x**2), "not finite at"),
}


@parametrize("case", REFUSED)
def test_refused(case):
    fn, message = REFUSED[case]
    with refuses(message):
        uu.unit_scaled(fn)(X)


@parametrize("mult", [0.0, -1.0, math.inf, math.nan])
def test_mult_is_positive(mult):
    with refuses("mult is a positive number, got"):
        U.tanh(X, mult)


def test_what_cannot_be_measured_is_refused():
    with refuses("settings of add are numbers and strings, got a tensor", TypeError):
        uu.unit_scaled(torch.add)(X, X)
    with refuses("infinite around"):
        normal_means(lambda x: (1 / x.abs())[None])


# --- rows ----------------------------------------------------------------------------------


@parametrize("op", [*DERIVED, OPS["gelu"], OPS["silu"]], ids=lambda op: op.name)
def test_in_place_and_integers(op):
    x = X.clone()
    assert op.fn(x, inplace=True) is x
    assert_close(x, op.fn(X))
    leaf, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    op.fn(leaf * 1, inplace=True).sum().backward()
    op.fn(other).sum().backward()
    assert_close(leaf.grad, other.grad)
