"""Grouped products: each group is the product of two matrices, whatever the recipe."""

import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
from fp8.lab.trace import trace
from fp8.products.grouped import grouped_mm
from fp8.products.matmul import linear, matmul
from tests.fp8.blocks import block, bytes_of, keeper, saved_by
from tests.fp8.compare import outcome
from tests.reference import nearest
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    in_one_graph,
    normal,
    pairs,
    parametrize,
    paths,
    proves,
    quietly,
    randn,
    refuses,
    rms,
    sampled,
)

K, N, GROUPS = 40, 24, 4
ENDS = [3, 3, 41, 90]  # uneven, one empty
TOKENS = 96  # the last six belong to no group
OFFS = torch.tensor(ENDS, dtype=torch.int32)
BF16 = torch.bfloat16

RECIPES = {name: nearest(recipe) for name, recipe in fp8.RECIPES.items()}
DYNAMIC = [name for name, recipe in RECIPES.items() if not recipe.keeps_history]
INEXACT = (
    *"deepseek_v3 nvfp4 nvfp4_nvidia four_over_six quartet2 tetrajet2".split(),
    *("bf16", "fp16"),
)


def pieces(x, axis):
    return [x.narrow(axis, a, b - a) for a, b in pairwise([0, *ENDS])]


def experts(x, w, recipe):
    """(tokens, k) x (groups, k, n), in a loop."""
    groups = pairs(pieces(x, 0), w.unbind())
    y = [linear(p, q.mT, recipe=recipe) for p, q in groups]
    return torch.cat([*y, x.new_zeros(TOKENS - ENDS[-1], w.shape[-1])])


def stacks(x, w, recipe):
    groups = pairs(x.unbind(), w.unbind())
    return torch.stack([linear(p, q.mT, recipe=recipe) for p, q in groups])


def summed(a, b, recipe):
    groups = pairs(pieces(a, 1), pieces(b, 0))
    return torch.stack([matmul(p, q, recipe=recipe) for p, q in groups])


def turned(w, x, recipe):
    return experts(x.mT, w.mT, recipe).mT


SHAPES = {
    "2d_3d": (experts, (TOKENS, K), (GROUPS, N, K), OFFS),
    "3d_3d": (stacks, (GROUPS, 32, K), (GROUPS, N, K), None),
    "2d_2d": (summed, (N, TOKENS), (TOKENS, K), OFFS),
    "3d_2d": (turned, (GROUPS, N, K), (K, TOKENS), OFFS),
}


def operands(shape, dtype=torch.float32):
    loop, first, second, offs = SHAPES[shape]
    a, b = randn(*first, dtype=dtype), randn(*second, seed=1, dtype=dtype)
    # Weights (groups, n, k), as modules do.
    right = b.mT if shape in ("2d_3d", "3d_3d") else b
    return loop, a, b, right, offs


def both(call, a, b):
    """The result and the gradients of both operands."""
    y = call()
    return outcome(lambda: y, (a, b), normal(*y.shape, seed=2, dtype=y.dtype))


@sampled(3)
@proves("the field", "grouped products of experts")
@parametrize("dtype", [torch.float32, BF16])
@parametrize("name", DYNAMIC)
@parametrize("shape", SHAPES)
def test_is_a_loop_over_the_groups(shape, name, dtype):
    """Bit for bit where scales are powers of two: then the sums of the products of 8-bit values are
    exact or in one order. Otherwise the two may sum operands of different layouts: within the
    rounding of K or N or the tokens of a group, at most 49 terms, each way."""
    loop, a, b, right, offs = operands(shape, dtype)
    recipe = RECIPES[name]
    got = both(lambda: grouped_mm(a, right, offs, recipe=recipe), a, b)
    inexact = name in INEXACT and dtype != BF16
    share = 49 * torch.finfo(dtype).eps if inexact else 0
    for ours, theirs in pairs(got, both(lambda: loop(a, right, recipe), a, b)):
        bound = share * float(theirs.abs().max())
        assert_close(ours, theirs, rtol=0, atol=bound)


@parametrize("shape", SHAPES)
def test_the_mode_computes_torchs_function(shape):
    loop, a, _, right, offs = operands(shape)
    with fp8.autocast("tensor"):
        y = F.grouped_mm(a, right, offs=offs)
    with fp8.autocast("tensor"):
        assert_same(torch._grouped_mm(a, right, offs), y)
    assert_same(y, loop(a, right, fp8.RECIPES["tensor"]))


@parametrize("shape", SHAPES)
def test_scales_are_those_of_the_operands(shape):
    scales = (0.5, 0.25, 3.0)
    _, a, b, right, offs = operands(shape, torch.float64)
    got = both(lambda: grouped_mm(a, right, offs, scales=scales), a, b)
    plain = both(lambda: grouped_mm(a, right, offs), a, b)
    assert_close(got, [scale * x for scale, x in pairs(scales, plain)])


@parametrize("shape", SHAPES)
def test_without_a_recipe_it_is_torchs(shape):
    _, a, _, right, offs = operands(shape)
    y, theirs = grouped_mm(a, right, offs), F.grouped_mm(a, right, offs=offs)
    if shape in ("2d_3d", "3d_2d"):  # torch leaves the others undefined
        axis = 0 if shape == "2d_3d" else 1
        assert not y.narrow(axis, ENDS[-1], TOKENS - ENDS[-1]).any()
        y, theirs = (t.narrow(axis, 0, ENDS[-1]) for t in (y, theirs))
    bound = 96 * 2**-23 * float(theirs.detach().abs().max())
    assert_close(y, theirs, rtol=0, atol=bound)


@parametrize("name", ["delayed", "static"])
def test_states_by_group(name):
    """Each group's history is that of a loop with an own history, and an empty group keeps its."""
    recipe = fp8.RECIPES[name]
    layer, own = keeper(recipe), [keeper(recipe) for _ in range(GROUPS)]
    w = randn(GROUPS, N, K, seed=1)
    for step, scale in enumerate((1.0, 8.0, 0.5)):
        x = (scale * normal(TOKENS, K, seed=step)).requires_grad_()
        with block(recipe, layer=layer):
            y = F.grouped_mm(x, w.mT, offs=OFFS)
        g = normal(*y.shape, seed=9)
        got = torch.autograd.grad(y, (x, w), g)
        wanted = [torch.zeros_like(x), torch.zeros_like(w)]
        for i, (start, end) in enumerate(pairwise([0, *ENDS])):
            if start < end:
                with block(recipe, layer=own[i]):
                    z = F.linear(x[start:end], w[i])
                assert_same(z, y[start:end])
                dx, dw = torch.autograd.grad(z, (x, w), g[start:end])
                wanted = [wanted[0] + dx, wanted[1] + dw]
        assert_same(got, wanted)
    kind = "amax" if name == "delayed" else "scale"
    for operand in ("input", "weight", "grad"):
        states = layer.get_buffer(f"fp8_{kind}_001_grouped_mm_{operand}")
        assert states.shape == ((GROUPS, 16) if name == "delayed" else (GROUPS,))
        for i in (0, 2, 3):
            alone = own[i].get_buffer(f"fp8_{kind}_001_linear_{operand}")
            assert_same(states[i], alone)
        assert operand == "weight" or not states[1].any()


class Experts(nn.Module):
    """As torchtitan's GroupedExperts: three stacks of weights, tokens sorted by expert."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(0.2 * normal(GROUPS, 48, 32))
        self.w2 = nn.Parameter(0.2 * normal(GROUPS, 32, 48, seed=1))
        self.w3 = nn.Parameter(0.2 * normal(GROUPS, 48, 32, seed=2))

    def forward(self, x, counts):
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        w1, w2, w3 = (w.to(x.dtype).mT for w in (self.w1, self.w2, self.w3))
        h = F.silu(F.grouped_mm(x, w1, offs=offs)) * F.grouped_mm(x, w3, offs=offs)
        return F.grouped_mm(h, w2, offs=offs)


COUNTS = torch.tensor([3, 0, 38, 49])


def inputs(dtype=torch.float32):
    return normal(90, 32, seed=5, dtype=dtype), COUNTS


@parametrize("name", "tensor mxfp8 delayed static".split())
def test_convert(name):
    model, args = Experts(), inputs()
    plain = model(*args).detach()
    with block(name):
        expected = deepcopy(model)(*args)
    fp8.convert(model, name)
    (row,) = fp8.report(model)
    assert (row.what, row.done) == ("Experts", "converted")
    y = model(*args)
    assert_same(y, expected)
    assert not torch.equal(y, plain)
    y.sum().backward()
    state = model.state_dict()
    other = fp8.convert(Experts(), name)
    other.load_state_dict(state)
    with torch.no_grad():
        assert_same(other(*args), deepcopy(model)(*args))
        assert_same(fp8.revert(other)(*args), plain)
    assert state.keys() - other.state_dict().keys() == {n for n in state if "fp8" in n}


def test_other_stacks_are_no_experts():
    shapes = (1, 8, 4), (2, 3, 4, 5)
    tables = [Net(table=nn.Parameter(torch.zeros(shape))) for shape in shapes]
    mixed = Experts()
    mixed.gate = nn.Linear(32, GROUPS)
    stacks = nn.ModuleList([*tables, mixed, nn.LayerNorm((2,) * 3)])
    report = fp8.report(fp8.convert(stacks))
    assert paths(report, "left alone") >= set("0123")
    assert "2.gate" in paths(report, "converted")


@sampled(2)
@parametrize("name", "row block nvfp4 static".split())
def test_compiled_is_eager(name):
    """Also in float32, which torch itself does not compile."""
    model, args = fp8.convert(Experts(), RECIPES[name]), inputs(BF16)
    if name == "static":
        fp8.calibrate(model, args)
    compiled = in_one_graph(model)
    found, expected = (
        outcome(lambda run=run: run(*args), model.parameters())
        for run in (compiled, model)
    )
    assert_same(found, expected)


def test_operands_are_saved_in_one_byte():
    x, w = randn(TOKENS, K), randn(GROUPS, N, K, seed=1)
    saved = saved_by(lambda: grouped_mm(x, w.mT, OFFS, recipe=RECIPES["tensor"]))
    assert (
        bytes_of(saved)
        == TOKENS * K + GROUPS * N * K + 4 * (TOKENS + GROUPS) + 4 * GROUPS
    )


def test_bad_input():
    x, w, offs = randn(TOKENS, K), randn(GROUPS, K, N), OFFS
    for left, right, ends, what in (
        (x, w, None, "needs offs"),
        (w, w.mT, offs, "only then"),
        (x[0], w, offs, "2 or 3 dimensions"),
        (x, w.mT, offs, "matching inner sizes"),
        (x, w[:3], offs, "one number of groups"),
        (x, w, offs.long(), "int32"),
        (x, w, torch.tensor([5, 3, 9, 9], dtype=torch.int32), "must ascend"),
        (x, w, torch.tensor([5, 6, 9, 97], dtype=torch.int32), "at most 96"),
    ):
        with refuses(what):
            grouped_mm(left, right, ends, recipe=RECIPES["tensor"])
    with refuses("one dtype", TypeError):
        grouped_mm(x, w.double(), offs)
    with fp8.autocast("tensor"), refuses("Bias not supported", RuntimeError):
        F.grouped_mm(x, w, offs=offs, bias=torch.zeros(N))


def test_trace_counts_the_flops_of_all_groups():
    """torch's own counter has none. The layer is that of the weight."""
    products = trace(Experts(), inputs())
    found = [(p.layer, p.weight_elements) for p in products]
    assert found == [("(model)", GROUPS * 48 * 32)] * 2
    assert sum(p.flops for p in products) == 3 * 2 * 90 * 32 * 48


with quietly():
    torchao = pytest.importorskip("torchao", reason="torchao is an oracle")
    from torchao.prototype.moe_training.mxfp8_grouped_mm import (
        _to_mxfp8_then_scaled_grouped_mm,
    )
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference


@proves("the field", "grouped products of experts", how="library")
def test_mxfp8_is_torchaos():
    """Forward and both gradients of its emulated grouped product, which multiplies the same bf16
    values: groups are multiples of 32 there."""
    offs = torch.tensor([32, 32, 64, 96], dtype=torch.int32)
    x, w = randn(TOKENS, 64, dtype=BF16), randn(GROUPS, 32, 64, seed=1, dtype=BF16)
    how = {
        "kernel_preference": KernelPreference.EMULATED,
        "scale_calculation_mode": ScaleCalculationMode.RCEIL,
        "pad_token_groups_for_grouped_mm": False,
    }
    call = lambda: _to_mxfp8_then_scaled_grouped_mm(x, w.mT, offs=offs, **how)  # noqa: E731
    ours = lambda: grouped_mm(x, w.mT, offs, recipe=RECIPES["mxfp8"])  # noqa: E731
    assert_same(both(ours, x, w), both(call, x, w))


def test_calibrate_sets_the_scale_of_every_expert():
    model, args = fp8.convert(Experts(), "static"), inputs()
    scales = fp8.calibrate(model, args)
    for i, x in enumerate(args[0].split(COUNTS.tolist())):
        wanted = round(math.log2(rms(x))) if len(x) else None
        assert scales[f"001_grouped_mm_input.{i}"] == wanted
        wanted = round(math.log2(rms(model.w1[i])))
        assert scales[f"001_grouped_mm_weight.{i}"] == wanted
    assert len(scales) == 3 * 3 * GROUPS
    other = fp8.convert(Experts(), "static")
    other(*args)
    assert fp8.calibrate(other, scales=scales) == scales
