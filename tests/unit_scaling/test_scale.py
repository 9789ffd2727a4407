import pytest
import torch

import fp8
import unit_scaling as uu
from tests.shared import assert_close, assert_same, in_one_graph, parametrize, refuses
from unit_scaling.constraints import CONSTRAINTS, apply_constraint
from unit_scaling.core import functional as core
from unit_scaling.scale import scale_bwd, scale_fwd

X = torch.arange(6.0).reshape(2, 3)


@parametrize("f", [scale_fwd, scale_bwd])
def test_scale(f):
    forward, backward = (3.0, 1.0) if f is scale_fwd else (1.0, 3.0)
    x = X.clone().requires_grad_()
    y = f(x, 3.0)
    y.sum().backward()
    assert_same(y, X * forward)
    assert_same(x.grad, torch.full_like(X, backward))
    assert f(X, 1) is X
    assert f(X.to(torch.bfloat16), 0.3).dtype == torch.bfloat16
    with refuses("a scale is a constant"):
        f(X, torch.tensor(2.0, requires_grad=True))


@parametrize("f", [scale_fwd, scale_bwd])
def test_scale_under_torch_func(f):
    """The derivative in forward mode is the one in reverse mode, whether gradients are recorded."""

    def g(x):
        return (f(x, 3.0) ** 2).sum()

    grad = torch.func.grad(g)(X)
    for records in (True, False):
        with torch.set_grad_enabled(records):
            _, tangent = torch.func.jvp(g, (X,), (torch.ones_like(X),))
        assert_close(grad.sum(), tangent)
    assert_close(torch.func.vmap(torch.func.grad(g))(X), grad)


#: By hand: 14/3 is the mean of 2, 4 and 8; 4 is their geometric mean; 24/7 the harmonic.
COMMON = {"amean": 14 / 3, "gmean": 4.0, "hmean": 24 / 7, "to_output_scale": 2.0}
COMMON |= {
    "to_left_grad_scale": 4.0,
    "to_right_grad_scale": 8.0,
    "to_grad_input_scale": 4.0,
}


@parametrize("name", CONSTRAINTS)
def test_constraint(name):
    assert getattr(uu.constraints, name) is CONSTRAINTS[name]
    scales = (2.0, 4.0) if name == "to_grad_input_scale" else (2.0, 4.0, 8.0)
    assert apply_constraint(name, *scales) == pytest.approx(
        (COMMON[name],) * len(scales)
    )
    assert apply_constraint(None, *scales) == apply_constraint("", *scales) == scales


@parametrize("name", ["pow", "apply_constraint", max, 3])
def test_unknown_constraint(name):
    with refuses("choose one of None, 'amean', 'gmean', 'hmean', 'to_gr"):
        apply_constraint(name, 2.0, 3.0)


@parametrize("name", ["gmean", "hmean"])
@parametrize("scales", [(-1.0, 2.0), (-1.0, -2.0), (0.0, 2.0), (0.0, 0.0)])
def test_means_that_have_no_value(name, scales):
    with refuses(f"{name} is a mean of numbers above 0"):
        apply_constraint(name, *scales)


def test_constraint_for_another_number_of_inputs():
    with refuses(r"to_grad_input_scale.* takes 2 .* but 3 were given", TypeError):
        uu.functional.matmul(X, X.T, constraint="to_grad_input_scale")
    with refuses(r"to_left_grad_scale.* missing 1 .*'right_grad_scale'", TypeError):
        uu.functional.gelu(X, constraint="to_left_grad_scale")


def test_rms():
    assert core.rms(X, dims=(1,), keepdim=True).shape == (2, 1)
    assert core.rms(torch.zeros(3), eps=0.25).item() == 0.5
    assert core.rms(torch.full((4,), 1000.0, dtype=torch.float16)).item() == 1000.0


def test_scale_elementwise():
    x = X.clone().requires_grad_()
    y = core.scale_elementwise(torch.square, 3.0, 5.0, constraint=None)(x)
    y.sum().backward()
    assert_same(y, 3 * X**2)
    assert_same(x.grad, 5 * 2 * X)


#: Two results of a function that have the same values, of which one has another gradient.
PAIRS = {
    "a view": lambda h: (h.flatten(), scale_bwd(h, 4.0)),
    "both": lambda h: (scale_bwd(h, 2.0), scale_bwd(h[:1], 4.0)),
    "a cast gradient": lambda h: (h, fp8.formats.quantize.quantize_backward(h, "e2m1")),
}


@parametrize("pair", PAIRS)
def test_results_of_a_graph_that_share_memory_have_their_own_gradients(pair):
    def run(x):
        return PAIRS[pair](x.sin())

    gradients = []
    for call in (run, in_one_graph(run)):
        x = X.clone().requires_grad_()
        first, second = call(x)
        (first.sum() + (1.3 * second).sum()).backward()
        gradients.append(x.grad)
    assert_close(gradients[1], gradients[0])
