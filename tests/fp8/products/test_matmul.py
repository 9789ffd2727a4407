import dataclasses
import itertools
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_compiler
from torch.nn import functional as F

import fp8
from fp8 import Cast, Format, Recipe
from fp8.products.grouped import grouped_mm
from fp8.products.matmul import linear, matmul
from tests.fp8.compare import outcome
from tests.reference import NONE, assert_within, cast, nearest, product, rotation, unrotated

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
    name: nearest(recipe) for name, recipe in fp8.RECIPES.items() if not recipe.keeps_history
}
RECIPES |= {"rotated": ROTATED}
"""With one right answer: rounding to nearest; test_history.py has those with a history."""

EVERY = [(torch.float32, name) for name in RECIPES]
EVERY += [(dtype, name) for dtype in DTYPES[1:] for name in ("none", "tensor", "block", "nvfp4")]
every = pytest.mark.parametrize(
    ("dtype", "recipe"),
    [(dtype, RECIPES[name]) for dtype, name in EVERY],
    ids=[f"{dtype}-{name}" for dtype, name in EVERY],
)
"""Every recipe, and every dtype with those that differ most."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def check(function, plain, operands, recipe, scales=SCALES, layer=True) -> None:
    """Value and gradients of both operands against the oracle. The rotation of 16 numbers of the
    gradient is exact: of one tile, the last bit decides which code rule "e4m3_4_6_up" takes."""
    dtype = operands[0].dtype
    with fp8.autocast(recipe):
        y = function(*operands, scales=scales)
    grad = (randn(*y.shape, seed=5).detach() * 64).round().to(dtype) / 64
    values, magnitudes = product(plain, operands, grad, scales, recipe, layer)
    got = outcome(lambda: y, operands, grad)
    for one, value, magnitude in zip(got, values, magnitudes, strict=True):
        assert one.dtype == dtype
        assert_within(one, value, magnitude, dtype)


@pytest.mark.sampled(3)
@every
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7), (5, 1)])
def test_linear(shape, dtype, recipe):
    operands = randn(*shape, dtype=dtype), randn(6, shape[-1], dtype=dtype)
    check(linear, F.linear, operands, recipe)


@pytest.mark.sampled(3)
@every
@pytest.mark.parametrize(
    ("left", "right"),
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
    ids=str,
)
def test_matmul(left, right, dtype, recipe):
    operands = randn(*left, dtype=dtype), randn(*right, dtype=dtype, seed=1)
    check(matmul, torch.matmul, operands, recipe, layer=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(37, 131, 66), (16, 128, 32)], ids=str)
def test_operands_of_more_than_one_tile(shape, name):
    """Tokens, inputs and outputs that tiles of 16, 32 and 128 divide, and that they do not."""
    tokens, inputs, outputs = shape
    check(linear, F.linear, (randn(tokens, inputs), randn(outputs, inputs)), RECIPES[name])


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_nvidia"])
def test_stochastic_gradients_are_unbiased(name):
    """Where they do not saturate: "nvfp4_nvidia" rounds some scales of tiles down."""
    recipe = fp8.RECIPES[name]
    g, eye = randn(8, 32).detach(), torch.eye(32)
    keep = Recipe(name="only the gradient", grad=recipe.grad)
    x = randn(8, 32)
    torch.manual_seed(0)
    draws = [torch.autograd.grad(linear(x, eye, recipe=keep), x, g)[0] for _ in range(200)]
    tiles = g.unflatten(-1, (2, 16))
    scale = fp8.recipes.scaling.scale_of(tiles, (-1,), fp8.FORMATS["e2m1"], recipe.grad.rule)
    expected = tiles.clamp(-6 * scale, 6 * scale).flatten(-2)
    assert torch.allclose(expected, g, rtol=1e-6, atol=0) == (name == "nvfp4")
    # A draw is one of two neighbours, at most two units apart: its deviation is at most one unit.
    error = (torch.stack(draws).mean(0) - expected).unflatten(-1, (2, 16)).abs()
    assert (error < 5 * scale / 200**0.5).all()
    assert not torch.equal(draws[0], draws[1])


def test_strided_operands():
    wide, tall = randn(5, 14)[:, ::2], randn(7, 6).mT
    check(linear, F.linear, (wide, tall), NONE)
    check(
        matmul, torch.matmul, (randn(7, 3, 5).permute(1, 2, 0), randn(4, 7).mT), NONE, layer=False
    )
    check(matmul, torch.matmul, (randn(1, 5, 7).expand(3, 5, 7), randn(7, 4)), NONE, layer=False)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_gradient_has_the_layout_of_its_operand(batch):
    """So that the product writes it where it stays: torch copies a .grad of another layout."""
    left, right = randn(*batch, 4, 5), randn(*batch, 5, 6)
    (grad,) = torch.autograd.grad(matmul(left, right).sum(), right)
    assert grad.is_contiguous()
    right = randn(*batch, 6, 5).mT.detach().requires_grad_()
    (grad,) = torch.autograd.grad(matmul(left, right).sum(), right)
    assert grad.mT.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scales", "factors"), [(SCALES, 2), ((0.5, 0.5, 0.5), 1)])
def test_a_compiled_batch_is_scaled_by_what_fuses(dtype, scales, factors):
    """Where it cannot overflow: of the tensor that baddbmm ignores inductor makes a whole one. One
    factor of both gradients is a multiplication of the one that they share."""
    graphs = []

    def kept(graph, _):
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    a, b = randn(2, 3, 4, dtype=dtype), randn(2, 4, 5, dtype=dtype)
    backend = aot_autograd(fw_compiler=make_boxed_compiler(kept))
    compiled = torch.compile(lambda a, b: matmul(a, b, scales=scales), backend=backend)
    got, expected = compiled(a, b), matmul(a, b, scales=scales)
    torch.testing.assert_close(got, expected)
    grad = torch.ones_like(got)
    gradients = (torch.autograd.grad(y, (a, b), grad) for y in (got, expected))
    torch.testing.assert_close(*gradients)
    calls = [
        [graph.count(f"aten.{name}") for graph in graphs] for name in ("baddbmm", "mul.Tensor")
    ]
    half = dtype == torch.float16
    assert calls == ([[1, 2], [0, 0]] if half else [[0, 0], [1, factors]])


def test_scales_of_one_and_powers_of_two_are_exact():
    x, w = randn(5, 7), randn(6, 7)
    assert torch.equal(linear(x, w), F.linear(x, w))
    assert torch.equal(linear(x, w, scales=(0.25, 1, 1)), F.linear(x, w) * 0.25)


@every
def test_bias(dtype, recipe):
    x, w, b = randn(2, 5, 7, dtype=dtype), randn(6, 7, dtype=dtype), randn(6, dtype=dtype)
    y = linear(x, w, b, scales=SCALES, recipe=recipe)
    grad = randn(2, 5, 6, dtype=dtype, seed=2).detach()
    values, magnitudes = product(F.linear, (x, w), grad, SCALES, recipe)
    value, magnitude = values[0] + b.detach().double(), magnitudes[0] + b.detach().double().abs()
    assert_within(y.detach(), value, magnitude, dtype)
    (db,) = torch.autograd.grad(y, b, grad)
    total = SCALES[2] * grad.double()
    assert_within(db, total.sum((0, 1)), total.abs().sum((0, 1)), dtype)  # no cast touches it


SUMMED = dataclasses.replace(fp8.RECIPES["tensor"], accumulate="ada")


@pytest.mark.parametrize(
    "recipe", [None, fp8.RECIPES["tensor"], SUMMED], ids=["none", "tensor", "summed"]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["simulate", pytest.param("native", marks=pytest.mark.native)])
def test_the_factor_of_a_bias_is_not_one_of_its_gradient(recipe, compiled, backend):
    torch.compiler.reset()
    x, w, b = randn(16, 32), randn(48, 32), randn(48)
    how = {"scales": SCALES, "recipe": recipe, "backend": backend}
    call = torch.compile(linear, backend="aot_eager") if compiled else linear
    y = call(x, w, b, bias_scale=0.25, **how)
    torch.testing.assert_close(y, linear(x, w, **how) + 0.25 * b)
    g = randn(16, 48, seed=2).detach()
    torch.testing.assert_close(torch.autograd.grad(y, b, g)[0], SCALES[2] * g.sum(0))


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3)))
def test_gradients_only_where_asked_for(needs):
    tensors = [randn(5, 7), randn(6, 7), randn(6)]
    wanted = torch.autograd.grad(
        linear(*tensors, scales=SCALES, recipe=fp8.RECIPES["unit"]).sum(), tensors
    )
    leaves = [t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
    y = linear(*leaves, scales=SCALES, recipe=fp8.RECIPES["unit"])
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
    for leaf, need, grad in zip(leaves, needs, wanted, strict=True):
        assert torch.equal(leaf.grad, grad) if need else leaf.grad is None


@pytest.mark.proves("the field", "emulation on CPU", how="own")
@every
def test_operands_are_exactly_the_reference_s(recipe, dtype):
    """Seen through a product with the unit matrix, which the casts leave as it is."""
    x, eye = randn(20, 40, dtype=dtype).detach(), torch.eye(40, dtype=dtype)
    plain = Recipe(name="plain", input=unrotated(recipe).input)
    expected = cast(x, plain.input).to(dtype)
    assert torch.equal(linear(x, eye, recipe=plain), expected)
    assert torch.equal(matmul(x, eye, recipe=plain), expected)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_double_backward(recipe):
    """The gradient of a gradient: all casts pass it unchanged, so it is that of the products."""
    x, w, b = (t.double().detach() for t in (randn(5, 7), randn(6, 7), randn(6)))
    g = randn(5, 6, seed=6).double().detach()
    u, v = randn(5, 7, seed=7).double().detach(), randn(6, 7, seed=8).double().detach()

    def of_gradients(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        product = partial(linear, bias=b, scales=SCALES, recipe=recipe)
        dx, dw = torch.func.vjp(product, x, w)[1](g)
        return (dx * u).sum() + (dw * v).sum()

    gx, gw, gg = torch.func.grad(of_gradients, (0, 1, 2))(x, w, g)

    def straight(x: Tensor, how: Cast | None, axis: int, size: int) -> Tensor:
        """A cast operand, rotated back."""
        y = cast(x, how, axis)
        if how is None or not how.hadamard:
            return y
        turn = torch.block_diag(*[rotation(how.hadamard)] * -(-size // how.hadamard))[:, :size]
        return y @ turn if axis == -1 else turn.mT @ y

    (for_x, again_w), (for_w, again_x) = recipe.grad_input, recipe.grad_weight
    qg, qw = straight(g, for_x, -1, 6), straight(w, again_w, -2, 6)
    qg_for_w, qx = straight(g, for_w, -2, 5), straight(x, again_x, -2, 5)
    # of sum(s_dx * qg qw * u + s_dw * qg_for_w' qx * v)
    torch.testing.assert_close(gx, SCALES[2] * qg_for_w @ v)
    torch.testing.assert_close(gw, SCALES[1] * qg.mT @ u)
    torch.testing.assert_close(gg, SCALES[1] * u @ qw.mT + SCALES[2] * qx @ v.mT)


@pytest.mark.parametrize("signs", ["fixed", "random"])
@pytest.mark.parametrize(
    "function", [linear, matmul, "grouped"], ids=lambda f: getattr(f, "__name__", f)
)
def test_a_rotation_cancels_in_all_three_products(function, signs):
    """With a format as precise as float32, so that nothing but the rotation is left."""
    wide = Format(name="wide", exponent_bits=8, mantissa_bits=23, bias=127, max=2.0**127)
    how = Cast(format=wide, hadamard=16, signs=signs)
    recipe = Recipe(name="turned", input=how, weight=how, grad=how)
    x, w, g = randn(40, 24), randn(3, 24, 20), randn(40, 20, seed=2).detach()
    offs = torch.tensor([5, 5, 38], dtype=torch.int32)
    if function == "grouped":
        y, plain = (grouped_mm(x, w, offs, recipe=r) for r in (recipe, None))
    else:
        other = w[0].mT if function is linear else w[0]
        y, plain = (function(x, other, recipe=r) for r in (recipe, None))
    got, wanted = (outcome(lambda t=t: t, (x, w), g) for t in (y, plain))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
        assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("drawn", [{"rounding": "stochastic"}, {"hadamard": 16, "signs": "random"}])
def test_random_casts_draw_anew_and_repeat_under_a_seed(drawn):
    x, w, how = randn(8, 32), randn(8, 32), Cast(format="e2m1", **drawn)
    recipe = Recipe(name="random", input=how, weight=how, grad=how)

    def three() -> list[Tensor]:
        return outcome(lambda: linear(x, w, recipe=recipe), (x, w))

    torch.manual_seed(0)
    first, second = three(), three()
    torch.manual_seed(0)
    for one, other, again in zip(first, second, three(), strict=True):
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def test_random_signs_of_a_graph_are_those_of_both_operands():
    """Of a saved operand the partitioner would rotate a copy in the forward graph, with others."""
    torch._dynamo.reset()
    plain = Cast(format="fp16", scaling="tensor")
    turned = dataclasses.replace(plain, hadamard=32, signs="random", rounding="stochastic")
    casts = dict.fromkeys(("grad_input_weight", "grad_weight_input"), turned)
    recipe = Recipe(name="signs", input=plain, weight=plain, grad=turned, **casts)
    weight, x = randn(3, 7, 7), randn(3, 7, 32)

    def forward(x: Tensor) -> Tensor:
        with fp8.autocast(recipe):
            return weight @ x

    exact = torch.autograd.grad((weight @ x).square().sum(), (weight, x))
    y = torch.compile(forward, fullgraph=True, backend="aot_eager")(x)
    for found, true in zip(torch.autograd.grad(y.square().sum(), (weight, x)), exact, strict=True):
        torch.testing.assert_close(found, true, rtol=0, atol=2e-3 * float(true.abs().max()))
    torch._dynamo.reset()


@pytest.mark.vmap
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # quantize works in place
def test_torch_func(recipe):
    x, w = randn(4, 5, 7).detach(), randn(6, 7).detach()

    def loss(w, x):
        return linear(x, w, scales=SCALES, recipe=recipe).square().sum()

    leaf = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, x[0]), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(w, x[0]), expected)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    torch.testing.assert_close(each[0], expected)  # vmap: each example has its own amax
    batched = torch.func.vmap(lambda x: matmul(x, w.mT, scales=SCALES))(x)
    torch.testing.assert_close(batched, matmul(x, w.mT, scales=SCALES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_torch_autocast(dtype, recipe):
    """Operands are rounded to the format from float32, then computed with in autocast's dtype."""
    x, w, b = randn(5, 7), randn(6, 7), randn(6)
    with torch.autocast("cpu", dtype=dtype):
        y = linear(x, w, b, scales=SCALES, recipe=recipe)
        z = matmul(x, w.mT, scales=SCALES, recipe=recipe)
        assert linear(x.double(), w.double()).dtype == torch.float64
    assert y.dtype == z.dtype == dtype
    grad = randn(5, 6, dtype=dtype, seed=9).detach()
    values, magnitudes = product(F.linear, (x, w), grad, SCALES, recipe)
    values[0] += b.detach()
    got = (y, *torch.autograd.grad(y, (x, w), grad))
    for one, value, magnitude in zip(got, values, magnitudes, strict=True):
        # without a cast the operands themselves are rounded to the dtype
        assert_within(one.detach().float(), value, magnitude + value.abs(), dtype, roundings=6)
    assert got[1].dtype == got[2].dtype == torch.float32


def test_integers_and_mixed_dtypes_are_torchs_own_matter():
    with pytest.raises(RuntimeError, match="dtype"):
        linear(randn(5, 7), randn(6, 7, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="dtype"):
        matmul(randn(5, 7), randn(7, 6, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="cannot quantize"):
        linear(torch.ones(2, 2, dtype=torch.long), torch.ones(2, 2), recipe=fp8.RECIPES["unit"])


def test_refusals():
    for x, w in ((randn(5, 7), randn(2, 6, 7)), (randn(5, 8), randn(6, 7)), (randn(), randn(6, 7))):
        with pytest.raises(ValueError, match=r"input of shape \(..., in\) and a weight of shape"):
            linear(x, w)
    for left, right in ((randn(), randn(7)), (randn(5, 7), randn(6, 7))):
        with pytest.raises(ValueError, match="matching inner sizes"):
            matmul(left, right)


def test_weight_of_one_dimension():
    x, w, b = randn(2, 5, 7), randn(7), randn(1).squeeze()
    torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b))
