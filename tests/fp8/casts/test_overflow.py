"""Inf and NaN in an operand reach the results of its products, and spare the numbers beside."""

import math

import pytest
import torch
from torch.nn import functional as F

import fp8
from fp8 import FORMATS, RECIPES, Cast
from fp8.casts.casting import cast_forward
from fp8.formats.quantize import quantize_operand
from fp8.recipes.rules import RULES
from fp8.recipes.scaling import SCALINGS
from tests import reference
from tests.fp8.blocks import block
from tests.fp8.kernels.scaled_mm import emulated
from tests.fp8.kernels.test_product import NATIVE, TILED
from tests.fp8.oracles import flush_denormal
from tests.shared import (
    assert_close,
    assert_same,
    filterwarnings,
    linears,
    normal,
    pairs,
    parametrize,
    sampled,
)

__all__ = ["emulated"]

BAD = [math.inf, -math.inf, math.nan]
EIGHT_BIT_SCALES = [n for n, r in RECIPES.items() if r.grad.scaling in ("mx", "nv")]
KINDS = "unit tensor delayed static row block deepseek_v3 mxfp8 nvfp4".split()
"""A recipe of each scaling, one with the sums of an accelerator, one with rotations."""


def results(function, operands, grad, recipe, backend="simulate"):
    """The output and the gradients of both operands, of a first pass."""
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    torch.manual_seed(0)
    with block(recipe, backend):
        y = function(*leaves)
    y.backward(grad)
    return y.detach(), *(leaf.grad for leaf in leaves)


def small(rows=32, inner=64, outer=32):
    """x, w and the gradient, of a size that a scale of 1 would flush to zero."""
    shapes = ((rows, inner), (outer, inner), (rows, outer))
    return [1e-2 * normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def check_linear(recipe, operand, bad, backend, sizes=(32, 64, 32)):
    """What a bad number is a factor of is not finite; where nothing of its tile is, all is."""
    tensors = small(*sizes)
    clean = [t.clone() for t in tensors]
    clean[operand][3, 5] = 0
    tensors[operand][3, 5] = bad
    got = results(F.linear, tensors[:2], tensors[2], recipe, backend)
    want = results(F.linear, clean[:2], clean[2], recipe, backend)
    # (result, index of what the bad number is multiplied into)
    reached = {
        0: [(0, (3,)), (2, (slice(None), 5))],
        1: [(0, (slice(None), 3)), (1, (slice(None), 5))],
        2: [(1, (3,)), (2, (5,))],
    }[operand]
    for result, index in reached:
        assert not got[result][index].isfinite().any()
    if recipe in EIGHT_BIT_SCALES:
        return
    for result, (g, w) in enumerate(pairs(got, want)):
        hit = torch.zeros_like(g, dtype=torch.bool)
        for which, index in reached:
            if which == result:
                hit[index] = True
        # Another order of sums where a kernel sees NaN and takes another way.
        assert_close(g[~hit], w[~hit], rtol=1e-5, atol=1e-8)


each_operand = parametrize("operand", [0, 1, 2], ids=["input", "weight", "grad"])
BACKENDS = [("simulate", recipe) for recipe in (*KINDS, "quartet2")]
BACKENDS += [("native", recipe) for recipe in NATIVE]


@each_operand
@parametrize("backend, recipe", BACKENDS)
def test_linear(backend, recipe, operand):
    for bad in BAD:
        check_linear(recipe, operand, bad, backend)


@pytest.mark.native
@each_operand
@parametrize("recipe", TILED)
def test_linear_native_with_scales_of_tiles(recipe, operand, emulated):
    check_linear(recipe, operand, math.inf, "native", (32, 128, 128))


PRODUCTS = {
    "matmul": (torch.matmul, (32, 64), (64, 32)),
    "batches": (torch.matmul, (2, 16, 32), (2, 32, 16)),
    "conv": (F.conv1d, (2, 32, 9), (16, 32, 3)),
    "attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        (1, 1, 8, 32),
        (1, 1, 8, 32),
    ),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (16, 32), (32, 16)),
}


@sampled(3)
@filterwarnings("ignore:.* has no sums of accumulate")
@parametrize("bad", BAD)
@parametrize("recipe", KINDS)
@parametrize("product", PRODUCTS)
def test_other_products(product, recipe, bad):
    """In the first operand, the second and the gradient: the results that each is a factor of.

    The output of attention is left out: for NaN in the query torch's own kernel for CPUs gives 0.
    """
    function, first, second = PRODUCTS[product]
    a, b = 1e-2 * normal(*first), 1e-2 * normal(*second, seed=1)
    grad = normal(*function(a, b).shape, seed=2)
    for operand, reached in enumerate(([0, 2], [0, 1], [1, 2])):
        tensors = [a.clone(), b.clone(), grad.clone()]
        tensors[operand].view(-1)[7] = bad
        found = results(function, tensors[:2], tensors[2], recipe)
        for result in reached[product == "attention" and operand == 0 :]:
            assert not found[result].isfinite().all()


@parametrize("recipe", KINDS)
def test_a_gradient_that_overflows_skips_the_step_and_halves_the_scale(recipe):
    model = linears(32, 32, 32)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with torch.autocast("cpu", torch.float16), block(recipe):
        y = model(normal(16, 32))
    # Its gradient, 200 * 65536 * y, is no float16.
    loss = 100 * y.float().square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768.0
    assert_same(before, [*model.parameters()])


@sampled(2)
@parametrize("recipe", ["tensor", "unit", "mxfp8"])
def test_compiled(recipe):
    """Also in the graphs of a compiler, which may know that 0 * x is 0."""
    linear = torch.compile(lambda x, w: F.linear(x, w), fullgraph=True)
    for operand, reached in enumerate(([0, 2], [0, 1], [1, 2])):
        for bad in BAD:
            tensors = small()
            tensors[operand][3, 5] = bad
            found = results(linear, tensors[:2], tensors[2], recipe)
            for result in reached:
                assert not found[result].isfinite().all()
            assert found[({0, 1, 2} - set(reached)).pop()].isfinite().all()


# --- the cast


FINITE = torch.tensor([0.0, -0.0, 1.0, -3.3, 1e-7, 3e38, -3e38, 1e30, 440.0, 2.0**-149])


@parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@parametrize("rounding", ["nearest", "stochastic"])
@parametrize("format", FORMATS.values())
def test_finite_values_saturate_and_others_stay(format, rounding, dtype):
    x = FINITE.to(dtype)
    x = torch.where(x.isinf(), 1.0, x)  # of float16
    expected = fp8.quantize(x, format, rounding=rounding)
    torch.manual_seed(0)
    got = quantize_operand(x, format, rounding=rounding)
    assert_same(got, expected)
    assert_same(got.signbit(), expected.signbit())
    bad = quantize_operand(torch.tensor(BAD, dtype=dtype), format, rounding=rounding)
    infinity = math.inf if format.infinity else math.nan
    wanted = torch.tensor([infinity, -infinity, math.nan], dtype=dtype)
    assert_close(bad, wanted, equal_nan=True)


MX = [name for name in FORMATS if FORMATS[name].max_exponent < 16]
SMALL_CASTS = {
    **{f"{format} {rule}": Cast(format=format, scaling="mx", rule=rule)
       for format in MX for rule in ("up", "floor")},
    "margin": Cast(format="e2m1", scaling="mx", margin=2),
    **{rule: Cast(format="e2m1", scaling="nv", rule=rule)
       for rule in SCALINGS["nv"].rules if not RULES[rule].correct},
}  # fmt: skip
TINY = torch.finfo(torch.float32).tiny


def at_every_exponent(how):
    """Matrices whose tiles have their largest magnitude at 2**-149 to 2**127, subnormal numbers
    taken for zero. The scales of "nv" depend on all of a matrix."""
    base = normal(277, 64).double()
    base = base / base.abs().unflatten(-1, (2, 32)).amax(-1).repeat_interleave(32, -1)
    base[:, 1::2] *= 2.0 ** -torch.arange(16.0).repeat(2)
    x = (base * 2.0 ** torch.arange(-149.0, 128.0, dtype=torch.double)[:, None]).float()
    x = torch.where(x.abs() < TINY, 0.0, x)
    return list(x.split(1)) if how.scaling == "nv" else [x]


@sampled(6)
@parametrize("cast", SMALL_CASTS)
def test_flushed_subnormals_change_no_normal_result(cast):
    """2**-127 is a scale of E8M0 and the inverse of another one: no product may use it."""
    how = SMALL_CASTS[cast]
    for x in at_every_exponent(how):
        with flush_denormal():
            got = cast_forward(x, how)
        wanted = [cast_forward(x, how)]
        wanted += [] if how.margin else [reference.cast(x, how).float()]
        for want in wanted:
            normal = want.abs() >= TINY
            assert_same(got[normal], want[normal])
            assert not (got[~normal].abs() > TINY).any()
