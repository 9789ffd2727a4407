"""Products: what is special about each, against float64 torch."""

import pytest
import torch
from torch.nn import functional as F

import fp8
import unit_scaling.functional as U
from fp8.products.grouped import grouped_mm
from tests import reference
from tests.fp8.compare import outcome
from tests.shared import assert_close, filterwarnings, pairs, parametrize
from unit_scaling.rules.table import OPS


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def assert_parallel(ours, theirs, inputs, scales):
    """The output and each gradient are torch's times a factor of the rule."""
    ones = torch.ones_like(ours)
    found, expected = (outcome(lambda y=y: y, inputs, ones) for y in (ours, theirs))
    expected = [x * scale for x, scale in pairs(expected, scales)]
    assert_close(found, expected, rtol=1e-9, atol=1e-9)


# --- addmm ---------------------------------------------------------------------------------


@parametrize("beta, alpha", [(1, 1), (0.5, -2.0), (-3.0, 1), (0, 2.0), (2.0, 0)])
@parametrize("form", ["addmm", "baddbmm"])
def test_weighted_sum(form, beta, alpha):
    """beta and alpha weigh two unit-scaled terms, and the gradients are those of that sum."""
    batch = (3,) if form == "baddbmm" else ()
    tensors = [normal(5, 7), normal(*batch, 5, 6), normal(*batch, 6, 7)]
    func = getattr(torch, form)
    ours = OPS["addmm"].call(tensors, {"beta": beta, "alpha": alpha}, func=func)
    norm = (beta**2 + alpha**2) ** 0.5
    theirs = func(*tensors, beta=beta / norm, alpha=alpha / norm / 6**0.5)
    assert_parallel(ours, theirs, tensors[1:], [1.0] * 3)
    if beta:
        assert_parallel(ours, theirs, tensors[:1], [1.0] * 2)


@parametrize("beta, alpha", [(1, 1), (0.5, -2.0), (0, 1)])
def test_addmm_with_a_bias(beta, alpha):
    x, w, b = normal(5, 6), normal(6, 7), normal(7)
    ours = U.addmm(b, x, w, beta, alpha, constraint=None)
    s = OPS["addmm"].rule(b, x, w, beta, alpha, constraint=None)
    theirs = torch.addmm(b, x, w, beta=beta, alpha=alpha)
    inputs, scales = [x, w], [s["mat1"], s["mat2"]]
    if beta:
        inputs, scales = [*inputs, b], [*scales, s["input"]]
    assert_parallel(ours, theirs, inputs, [s["output"], *scales])


def test_addmm_without_beta_does_not_read_its_input():
    nan, x = torch.full((2, 2), float("nan")), torch.ones(2, 2)
    assert U.addmm(nan, x, x, beta=0).isfinite().all()
    named = {"batch1": x[None], "batch2": x[None]}
    assert OPS["addmm"].call((x,), named, func=torch.baddbmm).shape == (1, 2, 2)


# --- einsum --------------------------------------------------------------------------------

EQUATIONS = {  # -> shapes of the operands
    "ij,jk->ik": [(4, 5), (5, 6)],
    "ij,kj": [(4, 5), (6, 5)],
    "bhqd,bkhd->bhqk": [(2, 3, 4, 5), (2, 6, 3, 5)],
    "bij,bij->b": [(2, 3, 4), (2, 3, 4)],
    "i,i->": [(5,), (5,)],
    "...ij,...jk->...ik": [(2, 1, 4, 5), (3, 5, 6)],
    "i...,i...": [(3, 4, 5), (3, 1, 5)],
    "ii->i": [(4, 4)],
    "ij->j": [(4, 5)],
    "iij,jk->k": [(3, 3, 4), (4, 5)],
    "ijx,jk->ik": [(4, 5, 2), (5, 6)],
    "ij,jk,kl->il": [(3, 4), (4, 5), (5, 6)],
    "bi,ijk,bj,k->b": [(4, 3), (3, 5, 2), (4, 5), (2,)],
}


@parametrize("equation", EQUATIONS)
def test_einsum(equation):
    operands = [normal(*shape) for shape in EQUATIONS[equation]]
    left, right, *more = (*operands, None) if len(operands) == 1 else operands
    for constraint in ("to_output_scale", None):
        ours = U.einsum(equation, left, right, more, constraint)
        theirs = torch.einsum(equation, *operands)
        s = OPS["einsum"].rule(equation, left, right, more, constraint)
        named = [s[name] for name in ("left", "right") if name in s]
        assert_parallel(ours, theirs, operands[:2], [s["output"], *named])


def test_einsum_factors_are_counted():
    """Independent standard normal operands: by Monte Carlo over 20000 draws, 5 standard errors."""
    equation = "ij,jk,kl->il"
    a, b, c = (torch.randn(20000, *shape) for shape in EQUATIONS[equation])
    y = torch.vmap(lambda *x: U.einsum(equation, x[0], x[1], x[2:]))(a, b, c)
    squares = y.square().flatten(1).mean(1)
    error = squares.std().item() / 20000**0.5
    assert squares.mean().item() == pytest.approx(1, abs=5 * error)


OFFS = torch.tensor([0, 3, 12, 32], dtype=torch.int32)
GROUPED = {
    "experts": ((32, 6), (4, 6, 10), OFFS, (6, 10, 8), {"right"}),
    "turned": ((4, 10, 6), (6, 32), OFFS, (6, 8, 10), {"left"}),
    "stacks": ((4, 5, 6), (4, 6, 10), None, (6, 10, 5), {"right"}),
    "summed": ((6, 32), (32, 10), OFFS, (8, 10, 6), set()),
}
"""Shapes, ends, the terms of the sums of output, left and right, and which are weights."""


@parametrize("constraint", [None, "to_output_scale"])
@parametrize("kind", GROUPED)
def test_grouped_mm_has_the_rule_of_linear_for_each_group(kind, constraint):
    left, right, offs, counts, weights = GROUPED[kind]
    terms = dict(pairs(("output", "left", "right"), counts))
    a, b = normal(*left), normal(*right)
    s = OPS["grouped_mm"].rule(a, b, offs, constraint)
    expected = {name: count**-0.5 for name, count in terms.items()}
    if constraint:
        tied = terms.keys() - weights
        expected |= dict.fromkeys(tied, expected["output"])
    assert s == pytest.approx(expected)
    y = U.grouped_mm(a, b, offs, constraint)
    assert_close(y, s["output"] * grouped_mm(a, b, offs))


# --- convolutions --------------------------------------------------------------------------

SIZES = {1: (17,), 2: (9, 8), 3: (6, 5, 7)}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 3, 1)}


SETTINGS = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": "valid", "dilation": 2},
    {"padding": "same"},
    {"padding": (1,), "stride": (2,), "groups": 2},
]
TRANSPOSED = [{}, {"stride": 2}, {"dilation": 2}]
TRANSPOSED += [{"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}]


@filterwarnings("ignore:Using padding='same' with even kernel lengths")
@parametrize("dims", [1, 2, 3])
@parametrize(
    "kind, setting",
    [
        *(("conv", each) for each in SETTINGS),
        *(("conv_transpose", each) for each in TRANSPOSED),
    ],
)
def test_convolution(kind, dims, setting):
    """Of a batch, and of one example."""
    setting = {k: v * dims if isinstance(v, tuple) else v for k, v in setting.items()}
    groups = setting.get("groups", 1)
    ends = (8, 4 // groups) if kind == "conv" else (4, 8 // groups)
    w, b = normal(*ends, *KERNELS[dims]), normal(8)
    op, plain = OPS[f"{kind}{dims}d"], getattr(F, f"{kind}{dims}d")
    for batch in ((3,), ()):
        x = normal(*batch, 4, *SIZES[dims])
        s = op.scales((x, w), setting)
        theirs = plain(x, w, b, **setting)
        scales = [s[name] for name in "output input weight bias".split()]
        assert_parallel(op.fn(x, w, b, **setting), theirs, [x, w, b], scales)
        if kind == "conv":
            assert s["weight"] == pytest.approx((theirs.numel() / 8) ** -0.5)
            assert s["output"] == pytest.approx(w[0].numel() ** -0.5)


GEOMETRIES = [  # kernel, stride, padding, length
    (3, 1, 1, 64),
    (16, 16, 0, 64),  # patches
    (1, 2, 0, 64),  # a shortcut that drops every other position
    (7, 1, 0, 7),  # the whole input
    (5, 3, 2, 65),
]


@parametrize("kernel, stride, padding, length", GEOMETRIES)
@parametrize("transposed", [False, True])
def test_counts_of_a_convolution(kernel, stride, padding, length, transposed):
    """With ones for values a product is the number of its terms: the rule's count is their mean.

    The edges, which the rule leaves aside, are at most the share of positions with padding in
    reach, or (transposed) with less than the kernel's reach of inputs.
    """
    x, w = torch.ones(2, 6, length), torch.ones(4, 6, kernel)
    x.requires_grad_()
    w.requires_grad_()
    op = OPS["conv_transpose1d" if transposed else "conv1d"]
    plain = op.replaces[0]
    turned = w.detach().transpose(0, 1).contiguous().requires_grad_()
    given, settings = (
        turned if transposed else w,
        {"stride": stride, "padding": padding},
    )
    s = op.scales((x, given), {**settings, "constraint": None})
    y = plain(x, given, **settings)
    y.sum().backward()
    found = {"output": y, "input": x.grad, "weight": given.grad}
    edge = 1 + 2 * kernel / length if transposed or padding else 1.0 + stride / length
    for name, count in found.items():
        assert 1 / edge <= s[name] ** -2 / count.mean().item() <= edge, name


# --- under a recipe ------------------------------------------------------------------------


CAST = {
    "linear": lambda a, b: U.linear(a, b),
    "matmul": lambda a, b: U.matmul(a, b.T, constraint=None),
    "addmm": lambda a, b: U.addmm(torch.zeros(5), a, b.T),
    "einsum": lambda a, b: U.einsum("ij,kj->ik", a, b, constraint=None),
    "conv2d": lambda a, b: U.conv2d(a[..., None, None], b[..., None, None])[..., 0, 0],
}


@parametrize("name", CAST)
def test_operands_are_cast_once(name):
    """Under a recipe a product is that of its operands, rounded once and unscaled."""
    a, b = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    g = torch.randn(6, 5)
    with fp8.autocast("unit"):
        y = CAST[name](a, b)
    y.backward(g)
    outputs = 5 if name in ("matmul", "einsum") else 8  # of those that are not tied
    scales = (8**-0.5, outputs**-0.5, 6**-0.5)
    values, magnitudes = reference.product(F.linear, [a, b], g, scales, "unit")
    for got, value, magnitude in pairs((y, a.grad, b.grad), values, magnitudes):
        reference.assert_within(got, value, magnitude, torch.float32)
