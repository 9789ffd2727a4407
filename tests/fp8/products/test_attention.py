"""Attention as the two products inside of it, each with its recipe."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    create_mask,
    flex_attention,
)

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from fp8 import RECIPES, Cast, Recipe
from fp8.products.attention import by_products
from tests import reference
from tests.fp8.blocks import block, keeper
from tests.fp8.products.test_matmul import randn

NOTHING = Recipe(name="nothing")
HEAD = Cast(format="e4m3", scaling="block", tile=(65536, 65536))


def same(cast: Cast) -> Recipe:
    return Recipe(name=str(cast), input=cast, weight=cast, grad=cast)


def inside(scores: Recipe, values: Recipe, outside: Recipe = NOTHING) -> Recipe:
    return dataclasses.replace(outside, attention_scores=scores, attention_values=values)


def run(recipe, operands: list[Tensor], grad: Tensor, **options) -> list[Tensor]:
    """Output and gradients of attention under a recipe; None: of torch."""
    operands = [x.detach().clone().requires_grad_() for x in operands]
    with fp8.autocast(recipe or NOTHING, enabled=recipe is not None):
        y = F.scaled_dot_product_attention(*operands, **options)
    return [y.detach(), *torch.autograd.grad(y, operands, grad)]


# --- the six products, by a loop over the heads


def loop(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> list[Tensor]:
    """Output and gradients for (heads, tokens, width) by their definition: every operand of every
    product cast by the oracle of casts, each head multiplied by itself, in float32."""

    def cast(x: Tensor, how: Cast | None, axis: int = -1) -> Tensor:
        return reference.cast(x, how, axis).float()

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([x @ y for x, y in zip(a, b, strict=True)])

    of_q, of_v = recipe.attention
    scores = scale * product(cast(q, of_q.forward[0]), cast(k, of_q.forward[1]).mT)
    scores.requires_grad_()
    p = scores.softmax(-1)
    y = product(cast(p, of_v.forward[0]), cast(v, of_v.forward[1], -2))
    dp = product(cast(g, of_v.grad_input[0]), cast(v, of_v.grad_input[1]).mT)
    dv = product(cast(p, of_v.grad_weight[1], -2).mT, cast(g, of_v.grad_weight[0], -2))
    (ds,) = torch.autograd.grad(p, scores, dp)
    dq = scale * product(cast(ds, of_q.grad_input[0]), cast(k, of_q.grad_input[1], -2))
    dk = scale * product(cast(ds, of_q.grad_weight[0], -2).mT, cast(q, of_q.grad_weight[1], -2))
    return [y.detach(), dq, dk, dv]


def integers(*shape: int, seed: int) -> Tensor:
    """Small integers, each off its e4m3 value, so that a cast is seen. Products of cast ones with
    probabilities and gradients of 18 bits are sums without rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-7, 8, shape, generator=generator) * (1 + 2.0**-6)


E4M3, E5M2 = Cast(format="e4m3", scaling="tensor"), Cast(format="e5m2", scaling="tensor")
ROW = Cast(format="e4m3", scaling="row")
INSIDE = {
    "tensor": inside(same(E4M3), same(E4M3)),
    "head": inside(same(HEAD), same(HEAD)),
    "row": inside(same(ROW), same(ROW)),
    "block": inside(*[same(Cast(format="e4m3", scaling="block", tile=(1, 4)))] * 2),
    "mx": inside(*[same(Cast(format="e4m3", scaling="mx", tile=(1, 2)))] * 2),
    "unit": inside(*[same(Cast(format="e4m3"))] * 2),
    "six casts": inside(
        Recipe(
            name="scores",
            input=HEAD,
            weight=ROW,
            grad=E4M3,
            grad_input_weight=E4M3,
            grad_weight_grad=ROW,
            grad_weight_input=ROW,
        ),
        Recipe(name="values", input=ROW, weight=HEAD, grad=HEAD, grad_weight_input=E4M3),
    ),
}


@pytest.mark.proves("the field", "attention in FP8", how="own")
@pytest.mark.parametrize("name", INSIDE)
def test_every_product_has_its_casts(name):
    """To the bit: the operands are chosen so that no order of a sum rounds."""
    q, k, v, g = (integers(3, *shape, seed=i) for i, shape in enumerate(SHAPES))
    got = run(INSIDE[name], [q, k, v], g)
    for one, other in zip(got, loop(INSIDE[name], q, k, v, g, 0.25), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(got, run(None, [q, k, v], g), strict=True):
        assert not torch.allclose(one, other)


SHAPES = ((4, 16), (5, 16), (5, 8), (4, 8))


class Emulated(torch.autograd.Function):
    """What TransformerEngine's FP8EmulationFunc does to a tensor or to its gradient, by torch's own
    dtype: a scale of the largest magnitude over the largest number."""

    @staticmethod
    def forward(ctx, x, dtype, backward):
        ctx.dtype = dtype if backward else None
        return x.view_as(x) if backward else Emulated.cast(x, dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.dtype is None else Emulated.cast(grad, ctx.dtype), None, None

    @staticmethod
    def cast(x, dtype):
        scale = x.abs().max() / torch.finfo(dtype).max
        return (x / scale).to(dtype).to(x.dtype) * scale


def test_the_form_that_transformer_engine_publishes():
    """Its unfused attention under Float8CurrentScaling (e4m3, gradients e5m2), in plain torch; the
    scale of each operand is its own."""
    forward, backward = (dataclasses.replace(c, rule="exact") for c in (E4M3, E5M2))
    recipe = Recipe(name="te", input=forward, weight=forward, grad=backward)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    operands = [randn(2, 3, 8, 16, seed=i).detach() for i in range(3)]
    g = randn(2, 3, 8, 16, seed=4).detach()
    leaves = [x.clone().requires_grad_() for x in operands]
    q, k, v = (Emulated.apply(x, e4m3, False) for x in leaves)
    scores = Emulated.apply(q @ k.mT * 0.25, e5m2, True)
    p = Emulated.apply(scores.softmax(-1), e4m3, False)
    y = Emulated.apply(p @ v, e5m2, True)
    wanted = [y.detach(), *torch.autograd.grad(y, leaves, g)]
    # No operand of this seed is next to a tie: only the order of sums of 8 and 16 terms differs, at
    # most 3 after each other, by up to 16 * 2**-24 each of the largest numbers.
    for one, other in zip(run(inside(recipe, recipe), operands, g), wanted, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_rows_of_probabilities_are_the_unnormalized_ones():
    """FlashAttention-3 casts exp(score - largest score) and divides by the sum afterwards. With a
    scale for each row by rule "exact" the normalized ones are rounded at the same places: both are
    448 times exp(score - largest score)."""
    row = Recipe(name="row", input=dataclasses.replace(ROW, rule="exact"))
    q, k, v = (randn(6, 32, 16, seed=i).detach() for i in range(3))
    scores = q @ k.mT * 0.25
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    cast = reference.rounded(448 * e, fp8.FORMATS["e4m3"]) / 448
    wanted = cast @ v.double() / e.double().sum(-1, keepdim=True)
    with fp8.autocast(inside(NOTHING, row)):
        y = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


# --- what attention takes, without casts: torch's own


def _mask(shape, floating: bool) -> Tensor:
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_arguments(name, dtype):
    options = OPTIONS[name]
    heads = 2 if options.get("enable_gqa") else 4
    shapes = ((2, 4, 6, 8), (2, heads, 7, 8), (2, heads, 7, 5), (2, 4, 6, 5))
    *operands, g = (randn(*shape, seed=i).detach().to(dtype) for i, shape in enumerate(shapes))
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options = {"attn_mask": options["attn_mask"].to(dtype)}
    near = {} if dtype != torch.bfloat16 else {"rtol": 2**-5, "atol": 2**-6}
    for one, other in zip(
        run(inside(NOTHING, NOTHING), operands, g, **options),
        run(None, operands, g, **options),
        strict=True,
    ):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, **near)


@pytest.mark.parametrize(
    "shape", [(6, 8), (3, 6, 8), (2, 2, 2, 6, 8), (2, 0, 8), (0, 6, 8)], ids=str
)
def test_dimensions(shape):
    operands = [randn(*shape, seed=i).detach() for i in range(3)]
    g = randn(*shape, seed=4).detach()
    for one, other in zip(
        run(inside(NOTHING, NOTHING), operands, g), run(None, operands, g), strict=True
    ):
        torch.testing.assert_close(one, other)
    run(INSIDE["tensor"], operands, g)


def test_dropout():
    """All probabilities with p=1; else those kept are divided by what is kept, before the cast."""
    q, k, v = (randn(2, 16, 8, seed=i).detach() for i in range(3))
    with fp8.autocast(INSIDE["tensor"]):
        assert not F.scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()
        torch.manual_seed(0)
        y, weights = by_products(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    scores = reference.cast(q, E4M3) @ reference.cast(k, E4M3).mT * 8**-0.5
    p = F.dropout(scores.float().softmax(-1), 0.5)
    torch.testing.assert_close(weights, p)
    wanted = reference.cast(weights, E4M3) @ reference.cast(v, E4M3)
    torch.testing.assert_close(y, wanted.float())


def test_under_torch_autocast():
    """The result has autocast's dtype, and the inside float32."""
    q, k, v = (randn(2, 6, 16, seed=i).detach() for i in range(3))
    with fp8.autocast(INSIDE["tensor"]), torch.autocast("cpu", torch.bfloat16):
        y = F.scaled_dot_product_attention(q, k, v)
    with fp8.autocast(INSIDE["tensor"]):
        wanted = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(y, wanted.bfloat16())


@pytest.mark.parametrize("learns", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_compiled(learns):
    """In one graph, with the bits of eager code; of the gradients too."""
    recipe = INSIDE["tensor"]
    if learns:
        recipe = inside(recipe.attention_scores, INSIDE["mx"].attention_values)
    *operands, g = (integers(2, 3, *shape, seed=i) for i, shape in enumerate(SHAPES))
    leaves = [x.clone().requires_grad_(learns) for x in operands]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(*operands):
        with fp8.autocast(recipe):
            return F.scaled_dot_product_attention(*operands, is_causal=True)

    y = attend(*leaves)
    eager = run(recipe, operands, g, is_causal=True)
    got = [y, *torch.autograd.grad(y, leaves, g)] if learns else [y]
    for one, other in zip(got, eager, strict=learns):
        assert torch.equal(one, other)


# --- where else attention is


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention(need_weights):
    """Both of its forms are the same products; converted, and under the block."""
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(32, 2, batch_first=True), randn(3, 6, 32).detach()
    recipe = inside(same(E4M3), same(E4M3), RECIPES["tensor"])
    mask = torch.ones(6, 6).triu(1).bool()
    with fp8.autocast(recipe):
        y, weights = layer(x, x, x, need_weights=need_weights, attn_mask=mask)
        other, _ = layer(x, x, x, need_weights=not need_weights, attn_mask=mask)
    assert (weights is None) != need_weights
    torch.testing.assert_close(y, other)
    with fp8.autocast("tensor"):
        default, _ = layer(x, x, x, need_weights=False, attn_mask=mask)
    assert not torch.equal(y, default)
    converted = fp8.convert(layer, recipe)
    torch.testing.assert_close(
        converted(x, x, x, need_weights=need_weights, attn_mask=mask)[0], other
    )


def test_unit_scaled_attention():
    """The factors of the op, around the same two products."""
    q, k, v = (randn(2, 4, 6, 16, seed=i).detach() for i in range(3))
    plain = U.scaled_dot_product_attention(q, k, v)
    factor = plain / F.scaled_dot_product_attention(q, k, v, scale=1 / 16)
    with fp8.autocast(INSIDE["tensor"]):
        y = U.scaled_dot_product_attention(q, k, v)
        wanted = F.scaled_dot_product_attention(q, k, v, scale=1 / 16)
    torch.testing.assert_close(y, wanted * factor)
    layer, x = uu.MultiheadAttention(32, 2, batch_first=True), randn(3, 6, 32).detach()
    with fp8.autocast(INSIDE["tensor"]):
        y, _ = layer(x, x, x, need_weights=False)
        with_weights, _ = layer(x, x, x)
    torch.testing.assert_close(y, with_weights)
    assert not torch.allclose(y, layer(x, x, x)[0])


BIAS = randn(4, 128, 128, seed=7).detach()
DOCUMENTS = (torch.arange(128) // 40).expand(2, -1)

MODS = {
    "plain": (None, None),
    "causal": (None, lambda b, h, q, k: q >= k),
    "documents": (None, lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q >= k)),
    "no key": (None, lambda b, h, q, k: (q > 5) & (k > 2)),
    "bias": (lambda s, b, h, q, k: s + BIAS[h, q, k], None),
    "slopes": (lambda s, b, h, q, k: s - (k - q).abs() * torch.exp2(-(h + 1.0)), None),
    "capped": (lambda s, b, h, q, k: 2 * torch.tanh(s / 2), lambda b, h, q, k: q >= k),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("name", MODS)
def test_flex_attention(name):
    """Without casts it is torch's, with its statistics; with casts that of a mask or bias."""
    score_mod, mask_mod = MODS[name]
    q = randn(2, 4, 128, 16).detach()
    k, v = (randn(2, 2, 128, 16, seed=seed).detach() for seed in (1, 2))
    mask = mask_mod and create_block_mask(mask_mod, 2, 4, 128, 128, device="cpu")

    def run(recipe):
        how = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        with fp8.autocast(recipe or NOTHING, enabled=recipe is not None):
            y, statistics = flex_attention(q, k, v, score_mod, mask, scale=0.25, **how)
        return [y, statistics.lse]

    plain = run(None)
    for one, other in zip(run(inside(NOTHING, NOTHING)), plain, strict=True):
        torch.testing.assert_close(one, other)
    cast = run(INSIDE["tensor"])[0]
    assert not torch.allclose(cast, plain[0], rtol=1e-3, atol=1e-3)
    if score_mod is None:
        whole = mask_mod and create_mask(mask_mod, 2, 4, 128, 128, device="cpu")
        with fp8.autocast(INSIDE["tensor"]):
            wanted = F.scaled_dot_product_attention(q, k, v, whole, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(cast, wanted)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_compiled():
    q, k, v = (integers(2, 4, 128, 16, seed=i) for i in range(3))
    mask = create_block_mask(MODS["documents"][1], 2, 4, 128, 128, device="cpu")

    def run():
        with fp8.autocast(INSIDE["head"]):
            return flex_attention(q, k, v, MODS["bias"][0], mask)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), run())


def test_statistics_name_the_operands():
    q, k, v = (randn(2, 6, 16, seed=i) for i in range(3))
    block = Recipe(name="mx", **dict.fromkeys(("input", "weight", "grad"), RECIPES["mxfp8"].input))
    stats = fp8.stats(nn.Linear(2, 2), every=1)
    with stats, fp8.autocast(inside(same(E4M3), block)):
        y = F.scaled_dot_product_attention(q, k, v)
    y.sum().backward()
    names = {(row.layer, row.operand) for row in stats.rows()}
    assert {o for layer, o in names if layer == "attention_scores 1"} == {"query", "key", "grad"}
    assert {o for layer, o in names if layer == "attention_values 1"} == {
        *("probabilities", "value", "grad"),
        *("probabilities again", "value again", "grad again"),
    }


def test_delayed_scales():
    """A history for each operand of both products."""
    recipe = inside(RECIPES["delayed"], RECIPES["delayed"])
    layer = keeper(recipe)
    q, k, v = (randn(2, 6, 16, seed=i) for i in range(3))
    with pytest.raises(ValueError, match="a scale belongs to a layer"):
        fp8.autocast(recipe)
    with block(recipe, layer=layer):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert sorted({name.rsplit("_", 1)[0] for name, _ in layer.named_buffers()}) == [
        *("fp8_amax_001_attention_scores", "fp8_amax_002_attention_values")
    ]
    assert all(bool(t[0] > 0) for t in layer.buffers())


def test_delayed_scales_of_what_is_inside_alone():
    """As TransformerEngine's fused kernel has them: of the probabilities and of the gradient of the
    scores. The second pass is cast with the scales of the first."""
    delayed = RECIPES["delayed"]
    scores = Recipe(name="scores", input=E4M3, weight=E4M3, grad=delayed.grad)
    values = Recipe(name="values", input=delayed.input, weight=E4M3, grad=E5M2)
    layer = fp8.convert(nn.MultiheadAttention(16, 2), inside(scores, values, RECIPES["tensor"]))
    for factor in (1.0, 4.0):
        layer(factor * randn(6, 2, 16), *[randn(6, 2, 16)] * 2)[0].sum().backward()
    assert all(int((t > 0).sum()) == 2 for t in layer.buffers())
    assert sorted(name for name, _ in layer.named_buffers()) == [
        *("fp8_amax_001_attention_scores_grad", "fp8_amax_002_attention_values_input")
    ]


def test_sums_of_an_accelerator():
    """The products inside of attention have the sums of their own recipes, as two layers do."""
    hopper = dataclasses.replace(same(E4M3), accumulate="hopper")
    q, k, v = (randn(64, 64, seed=i).detach() for i in range(3))
    with fp8.autocast(inside(hopper, hopper)):
        y = F.scaled_dot_product_attention(q, k, v)
    with fp8.autocast(hopper):
        wanted = F.linear((F.linear(q, k) / 8).softmax(-1), v.T)
    assert torch.equal(y, wanted)
    with fp8.autocast(INSIDE["tensor"]):
        assert not torch.equal(y, F.scaled_dot_product_attention(q, k, v))


# --- recipes


def test_json_and_policy():
    recipe = inside(same(E4M3), same(HEAD), RECIPES["tensor"])
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    policy = fp8.Policy(recipe, rules=[("0", "grad_weight", None)])
    assert fp8.Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    model = fp8.convert(nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)), policy)
    assert model[0].fp8_recipe.attention == recipe.attention
    assert model[0].fp8_recipe.grad_weight == (None, None)


def test_mistakes():
    one = same(E4M3)
    for fields in ({"attention_scores": one}, {"attention_values": one}):
        with pytest.raises(TypeError, match=r"must be a Recipe, if .* are given, not None"):
            Recipe(name="half", **fields)
    with pytest.raises(TypeError, match=r"attention_scores must be a Recipe, .* not 'tensor'"):
        Recipe(name="name", attention_scores="tensor", attention_values="tensor")
    with pytest.raises(ValueError, match="attention_scores is one product"):
        inside(inside(one, one), one)
    q = randn(2, 6, 16).detach()
    mask = torch.ones(6, 6, dtype=torch.bool)
    with fp8.autocast(INSIDE["tensor"]):
        with pytest.raises(ValueError, match="is_causal=True needs attn_mask=None"):
            F.scaled_dot_product_attention(q, q, q, mask, is_causal=True)
        with pytest.raises(TypeError, match=r"one dtype, got torch.float32, torch.float64"):
            F.scaled_dot_product_attention(q, q.double(), q)
        with pytest.raises(TypeError, match="attn_mask must be boolean or floating point"):
            F.scaled_dot_product_attention(q, q, q, mask.long())
        with pytest.raises(ValueError, match="heads that divide 3, got 2 of the key"):
            F.scaled_dot_product_attention(
                randn(1, 3, 6, 8), randn(1, 2, 6, 8), randn(1, 2, 6, 8), enable_gqa=True
            )
