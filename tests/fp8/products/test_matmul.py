import dataclasses
import itertools
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import fp8
from fp8 import Cast, Format, Recipe
from fp8.products.grouped import grouped_mm
from fp8.products.matmul import linear, matmul
from tests.fp8.compare import outcome
from tests.reference import (
    NONE,
    assert_within,
    cast,
    nearest,
    product,
    rotation,
    unrotated,
)
from tests.shared import (
    assert_close,
    assert_same,
    filterwarnings,
    normal,
    one_in,
    pairs,
    parametrize,
    proves,
    randn,
    refuses,
    sampled,
)

SCALES = (0.3, 2.5, 0.7)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


ROTATED = Recipe(
    name="rotated",
    input=Cast(format="e4m3", scaling="row", hadamard=16),
    weight=Cast(format="e4m3", scaling="tensor", hadamard=16),
    grad=Cast(format="e2m1", scaling="mx", hadamard=32),
    grad_input_weight=Cast(format="e4m3", scaling="row", hadamard=32),
    grad_weight_grad=Cast(format="e5m2", scaling="unit", hadamard=4),
    grad_weight_input=Cast(format="e2m1", scaling="nv", hadamard=4),
)
"""All three products are rotated, each otherwise."""

RECIPES = {"none": NONE} | {
    name: nearest(recipe)
    for name, recipe in fp8.RECIPES.items()
    if not recipe.keeps_history
}
RECIPES |= {"rotated": ROTATED}
"""With one right answer: rounding to nearest; test_history.py has those with a history."""

EVERY = [(torch.float32, name) for name in RECIPES]
EVERY += [
    (dtype, name) for dtype in DTYPES[1:] for name in "none tensor block nvfp4".split()
]
every = parametrize(
    "dtype, recipe",
    [(dtype, RECIPES[name]) for dtype, name in EVERY],
    ids=[f"{dtype}-{name}" for dtype, name in EVERY],
)
"""Every recipe, and every dtype with those that differ most."""


def check(function, plain, operands, recipe, scales=SCALES, layer=True):
    """Value and gradients of both operands against the oracle. The rotation of 16 numbers of the
    gradient is exact: of one tile, the last bit decides which code rule "e4m3_4_6_up" takes."""
    dtype = operands[0].dtype
    with fp8.autocast(recipe):
        y = function(*operands, scales=scales)
    grad = (normal(*y.shape, seed=5) * 64).round().to(dtype) / 64
    values, magnitudes = product(plain, operands, grad, scales, recipe, layer)
    got = outcome(lambda: y, operands, grad)
    for one, value, magnitude in pairs(got, values, magnitudes):
        assert one.dtype == dtype
        assert_within(one, value, magnitude, dtype)


@sampled(3)
@every
@parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7), (5, 1)])
def test_linear(shape, dtype, recipe):
    operands = randn(*shape, dtype=dtype), randn(6, shape[-1], dtype=dtype)
    check(linear, F.linear, operands, recipe)


@sampled(3)
@every
@parametrize(
    "left, right",
    [
        ((7,), (7,)),
        ((7,), (7, 4)),
        ((5, 7), (7,)),
        ((3, 5, 7), (7, 4)),
        ((5, 7), (3, 7, 4)),
        ((2, 1, 5, 7), (3, 7, 4)),
        ((3, 5, 7), (1, 7, 4)),
        ((0, 5, 7), (7, 4)),
        ((3, 5, 0), (3, 0, 4)),
    ],
)
def test_matmul(left, right, dtype, recipe):
    operands = randn(*left, dtype=dtype), randn(*right, dtype=dtype, seed=1)
    check(matmul, torch.matmul, operands, recipe, layer=False)


@sampled(2)
@parametrize("name", RECIPES)
@parametrize("shape", [(37, 131, 66), (16, 128, 32)])
def test_operands_of_more_than_one_tile(shape, name):
    """Tokens, inputs and outputs that tiles of 16, 32 and 128 divide, and that they do not."""
    tokens, inputs, outputs = shape
    operands = randn(tokens, inputs), randn(outputs, inputs)
    check(linear, F.linear, operands, RECIPES[name])


def test_strided_operands():
    wide, tall = randn(5, 14)[:, ::2], randn(7, 6).mT
    check(linear, F.linear, (wide, tall), NONE)
    for operands in (
        (randn(7, 3, 5).permute(1, 2, 0), randn(4, 7).mT),
        (randn(1, 5, 7).expand(3, 5, 7), randn(7, 4)),
    ):
        check(matmul, torch.matmul, operands, NONE, layer=False)


@every
def test_bias(dtype, recipe):
    x, w, b = (randn(*s, dtype=dtype) for s in ((2, 5, 7), (6, 7), (6,)))
    y = linear(x, w, b, scales=SCALES, recipe=recipe)
    grad = normal(2, 5, 6, dtype=dtype, seed=2)
    values, magnitudes = product(F.linear, (x, w), grad, SCALES, recipe)
    wide = b.detach().double()
    assert_within(y.detach(), values[0] + wide, magnitudes[0] + wide.abs(), dtype)
    (db,) = torch.autograd.grad(y, b, grad)
    total = SCALES[2] * grad.double()
    # No cast touches it.
    assert_within(db, total.sum((0, 1)), total.abs().sum((0, 1)), dtype)


SUMMED = dataclasses.replace(fp8.RECIPES["tensor"], accumulate="ada")


@parametrize(
    "recipe", [None, fp8.RECIPES["tensor"], SUMMED], ids=["none", "tensor", "summed"]
)
@parametrize("compiled", [False, one_in(2, True)])
@parametrize("backend", ["simulate", pytest.param("native", marks=pytest.mark.native)])
def test_the_factor_of_a_bias_is_not_one_of_its_gradient(recipe, compiled, backend):
    x, w, b = randn(16, 32), randn(48, 32), randn(48)
    how = {"scales": SCALES, "recipe": recipe, "backend": backend}
    call = torch.compile(linear, backend="aot_eager") if compiled else linear
    y = call(x, w, b, bias_scale=0.25, **how)
    assert_close(y, linear(x, w, **how) + 0.25 * b)
    g = normal(16, 48, seed=2)
    assert_close(torch.autograd.grad(y, b, g)[0], SCALES[2] * g.sum(0))


@parametrize("needs", list(itertools.product((True, False), repeat=3)))
def test_gradients_only_where_asked_for(needs):
    tensors = [randn(5, 7), randn(6, 7), randn(6)]
    how = {"scales": SCALES, "recipe": fp8.RECIPES["unit"]}
    wanted = torch.autograd.grad(linear(*tensors, **how).sum(), tensors)
    leaves = [t.detach().requires_grad_(n) for t, n in pairs(tensors, needs)]
    y = linear(*leaves, **how)
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
    for leaf, need, grad in pairs(leaves, needs, wanted):
        assert torch.equal(leaf.grad, grad) if need else leaf.grad is None


@proves("the field", "emulation on CPU")
@every
def test_operands_are_exactly_the_reference_s(recipe, dtype):
    """Seen through a product with the unit matrix, which the casts leave as it is."""
    x, eye = normal(20, 40, dtype=dtype), torch.eye(40, dtype=dtype)
    plain = Recipe(name="plain", input=unrotated(recipe).input)
    expected = cast(x, plain.input).to(dtype)
    assert_same(linear(x, eye, recipe=plain), expected)
    assert_same(matmul(x, eye, recipe=plain), expected)


@parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_double_backward(recipe):
    """The gradient of a gradient: all casts pass it unchanged, so it is that of the products."""
    sizes = ((5, 7), (6, 7), (6,), (5, 6), (5, 7), (6, 7))
    x, w, b, g, u, v = (normal(*s, seed=i).double() for i, s in enumerate(sizes))

    def of_gradients(x, w, g):
        product = partial(linear, bias=b, scales=SCALES, recipe=recipe)
        dx, dw = torch.func.vjp(product, x, w)[1](g)
        return (dx * u).sum() + (dw * v).sum()

    gx, gw, gg = torch.func.grad(of_gradients, (0, 1, 2))(x, w, g)

    def straight(x, how, axis, size):
        """A cast operand, rotated back."""
        y = cast(x, how, axis)
        if how is None or not how.hadamard:
            return y
        blocks = [rotation(how.hadamard)] * -(-size // how.hadamard)
        turn = torch.block_diag(*blocks)[:, :size]
        return y @ turn if axis == -1 else turn.mT @ y

    (for_x, again_w), (for_w, again_x) = recipe.grad_input, recipe.grad_weight
    qg, qw = straight(g, for_x, -1, 6), straight(w, again_w, -2, 6)
    qg_for_w, qx = straight(g, for_w, -2, 5), straight(x, again_x, -2, 5)
    # of sum(s_dx * qg qw * u + s_dw * qg_for_w' qx * v)
    assert_close(gx, SCALES[2] * qg_for_w @ v)
    assert_close(gw, SCALES[1] * qg.mT @ u)
    assert_close(gg, SCALES[1] * u @ qw.mT + SCALES[2] * qx @ v.mT)


@parametrize("signs", ["fixed", "random"])
@parametrize(
    "function", [linear, matmul, "grouped"], ids=lambda f: getattr(f, "__name__", f)
)
def test_a_rotation_cancels_in_all_three_products(function, signs):
    """With a format as precise as float32, so that nothing but the rotation is left."""
    wide = Format(
        name="wide", exponent_bits=8, mantissa_bits=23, bias=127, max=2.0**127
    )
    how = Cast(format=wide, hadamard=16, signs=signs)
    recipe = Recipe(name="turned", input=how, weight=how, grad=how)
    x, w, g = randn(40, 24), randn(3, 24, 20), normal(40, 20, seed=2)
    offs = torch.tensor([5, 5, 38], dtype=torch.int32)
    if function == "grouped":
        y, plain = (grouped_mm(x, w, offs, recipe=r) for r in (recipe, None))
    else:
        other = w[0].mT if function is linear else w[0]
        y, plain = (function(x, other, recipe=r) for r in (recipe, None))
    got, wanted = (outcome(lambda t=t: t, (x, w), g) for t in (y, plain))
    for ours, theirs in pairs(got, wanted):
        assert_close(ours, theirs, rtol=0, atol=2e-5)
        assert not torch.equal(ours, theirs)


@pytest.mark.vmap
@parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
@filterwarnings("ignore:There is a performance drop")  # quantize works in place
def test_torch_func(recipe):
    x, w = normal(4, 5, 7), normal(6, 7)

    def loss(w, x):
        return linear(x, w, scales=SCALES, recipe=recipe).square().sum()

    leaf = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, x[0]), leaf)
    assert_close(torch.func.grad(loss)(w, x[0]), expected)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    assert_close(each[0], expected)  # vmap: each example has its own amax
    batched = torch.func.vmap(lambda x: matmul(x, w.mT, scales=SCALES))(x)
    assert_close(batched, matmul(x, w.mT, scales=SCALES))


def test_refusals():
    for x, w in (((5, 7), (2, 6, 7)), ((5, 8), (6, 7)), ((), (6, 7))):
        with refuses(r"input of shape \(..., in\) and a weight of shape"):
            linear(randn(*x), randn(*w))
    for left, right in (((), (7,)), ((5, 7), (6, 7))):
        with refuses("matching inner sizes"):
            matmul(randn(*left), randn(*right))


def test_weight_of_one_dimension():
    x, w, b = randn(2, 5, 7), randn(7), randn(1).squeeze()
    assert_close(linear(x, w, b), F.linear(x, w, b))
