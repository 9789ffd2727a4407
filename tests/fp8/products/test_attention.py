"""Attention under a recipe: one product of cast operands; and as two products."""

import math

import torch
from torch.nn import functional as F

import fp8
from fp8 import RECIPES
from fp8.casts.casting import cast_forward
from fp8.products.attention import by_products
from tests.fp8.compare import outcome
from tests.shared import (
    assert_close,
    assert_same,
    normal,
    pairs,
    parametrize,
    proves,
    randn,
    refuses,
    seeded,
)


@proves("the field", "attention in FP8")
@parametrize("name", "unit tensor row block nvfp4".split())
def test_attention_is_one_product_of_cast_operands(name):
    """Query and key along their width, value along the keys, the gradient of the output along its
    width; gradients pass straight through the casts."""
    recipe = RECIPES[name]
    leaves = [randn(2, 4, 64, 32, seed=i) for i in range(3)]
    g = normal(2, 4, 64, 32, seed=3)
    with fp8.autocast(recipe):
        y = F.scaled_dot_product_attention(*leaves, is_causal=True)
    torch.manual_seed(0)
    got = outcome(lambda: y, leaves, g)
    operands = pairs(leaves, (-1, -1, -2))
    cast = [cast_forward(x.detach(), recipe.input, axis) for x, axis in operands]
    cast = [x.requires_grad_() for x in cast]
    torch.manual_seed(0)
    g = cast_forward(g, recipe.grad)
    assert_same(
        got,
        outcome(lambda: F.scaled_dot_product_attention(*cast, is_causal=True), cast, g),
    )


def _mask(shape, floating):
    kept = torch.rand(shape, generator=seeded(3)) < 0.7
    kept[..., 0] = True
    kept[..., 1, :] = False  # a query without a key
    return torch.zeros(shape).masked_fill_(~kept, -math.inf) if floating else kept


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "boolean": {"attn_mask": _mask((2, 1, 6, 7), False)},
    "additive": {"attn_mask": _mask((6, 7), True)},
    "grouped": {"enable_gqa": True},
    "dropout of nothing": {"dropout_p": 0.0},
}


def compare(operands, g, options, **near):
    """Output and gradients of two products without casts, and of torch."""
    leaves = [x.clone().requires_grad_() for x in operands]
    ours = outcome(lambda: by_products(*leaves, cast=False, **options)[0], leaves, g)
    torchs = outcome(
        lambda: F.scaled_dot_product_attention(*leaves, **options), leaves, g
    )
    assert_close(ours, torchs, **near)


@parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@parametrize("name", OPTIONS)
def test_arguments(name, dtype):
    options = OPTIONS[name]
    heads = 2 if options.get("enable_gqa") else 4
    shapes = ((2, 4, 6, 8), (2, heads, 7, 8), (2, heads, 7, 5), (2, 4, 6, 5))
    *operands, g = (normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))
    if name == "additive":
        options = {"attn_mask": options["attn_mask"].to(dtype)}
    near = {} if dtype != torch.bfloat16 else {"rtol": 2**-5, "atol": 2**-6}
    compare(operands, g, options, **near)


@parametrize("shape", [(6, 8), (3, 6, 8), (2, 2, 2, 6, 8), (2, 0, 8), (0, 6, 8)])
def test_dimensions(shape):
    *operands, g = (normal(*shape, seed=i) for i in range(4))
    compare(operands, g, {})
    with fp8.autocast("tensor"):
        by_products(*operands)


def test_two_products_are_cast_as_any_other():
    """In float32, also under torch.autocast, whose dtype the result has. Probabilities are cast
    after the division by what dropout keeps."""
    q, k, v = (normal(2, 16, 8, seed=i) for i in range(3))
    with fp8.autocast("tensor"):
        assert not by_products(q, k, v, dropout_p=1.0)[0].any()
        torch.manual_seed(0)
        y, weights = by_products(q, k, v, dropout_p=0.5)
        torch.manual_seed(0)
        wanted = F.dropout((q @ k.mT * 8**-0.5).softmax(-1), 0.5)
        assert_close(weights, wanted)
        assert_close(y, weights @ v)
        y, weights = by_products(q, k, v)
        with torch.autocast("cpu", torch.bfloat16):
            half = by_products(q, k, v)
    assert_same(half[0], y.bfloat16())
    assert_same(half[1], weights.bfloat16())


def test_mistakes():
    q = normal(2, 6, 16)
    mask = torch.ones(6, 6, dtype=torch.bool)
    with refuses("is_causal=True needs attn_mask=None"):
        by_products(q, q, q, mask, is_causal=True)
    with refuses(r"one dtype, got torch.float32, torch.float64", TypeError):
        by_products(q, q.double(), q)
    with refuses("boolean mask", RuntimeError):
        by_products(q, q, q, mask.long())
    with refuses("heads that divide 3, got 2 of the key"):
        by_products(
            randn(1, 3, 6, 8), randn(1, 2, 6, 8), randn(1, 2, 6, 8), enable_gqa=True
        )
