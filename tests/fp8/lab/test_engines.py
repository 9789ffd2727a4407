"""The casts, products and norms of engines against the formulas of their sources."""

import dataclasses

import torch
from torch import nn

import fp8
from fp8.casts.casting import quantized
from fp8.lab.parity.engines import ENGINES
from fp8.lab.parity.norms import ORDERS, norms_of_engine, rms_norm_of
from fp8.products.matmul import linear
from tests.shared import Net, assert_same, parametrize, refuses, seeded

E4M3 = torch.float8_e4m3fn


def in_e4m3(x):
    return x.clamp(-448, 448).to(E4M3)


# vllm-project/vllm, csrc/quantization/w8a8/fp8/common.cu.
def vllm_token(x):
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return in_e4m3(x / scale), scale


# csrc/quantization/w8a8/fp8/per_token_group_quant.cu, a group in the last dimension.
def vllm_group(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return in_e4m3(x / scale), scale


def vllm_group_ue8m0(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    scale = torch.exp2(torch.ceil(torch.log2(scale.clamp(min=1e-10).double())))
    return in_e4m3(x / scale.float()), scale.float()


# sgl-project/sglang, sgl-kernel/csrc/gemm/per_token_quant_fp8.cu.
def sglang_token(x):
    scale = x.abs().amax(-1, keepdim=True) / 448
    return in_e4m3(x * (1 / scale)), scale


# sgl-kernel/csrc/gemm/per_token_group_quant_8bit.cu.
def sglang_group(x):
    amax = x.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    # A number divided by a tensor is multiplied by its reciprocal in torch.
    return in_e4m3(x * (torch.tensor(448.0) / amax)), amax * (torch.tensor(1.0) / 448)


CASTS = {
    "vllm_row": vllm_token,
    "vllm_0_20_row": vllm_token,
    "vllm_block": vllm_group,
    "vllm_block_ue8m0": vllm_group_ue8m0,
    "sglang_row": sglang_token,
    "sglang_block": sglang_group,
}


def rows(least):
    """All bfloat16 numbers of 24 binades below each of 128 largest magnitudes, and small ones.
    least: of the largest magnitudes of groups; those of other groups are zeros."""
    codes = torch.arange(0x3F80 - 24 * 128, 0x3F80 + 128, dtype=torch.int16)
    x = codes.view(torch.bfloat16).float().repeat(128, 1)
    largest = (torch.arange(128) + 128) / 128
    x = torch.where(x <= largest[:, None], x, -largest[:, None])
    x = torch.cat([x, largest[:, None].expand(-1, 128)], 1)
    x = torch.cat([x * 2.0**e for e in (0, -9, -20, 40, -30, -33, -34, -60)])
    x = x.unflatten(-1, (-1, 128))
    return torch.where(x.abs().amax(-1, keepdim=True) > least, x, 0.0).flatten(-2)


@parametrize("name", CASTS)
def test_inputs_are_cast_as_by_the_source(name):
    cast = ENGINES[name].recipe.input
    # Groups that the engine flushes and the recipe does not (`Engine`).
    x = rows(least=2e-7 if name == "vllm_block_ue8m0" else 0)
    if cast.scaling == "block":
        wanted, scale = CASTS[name](x.unflatten(-1, (-1, 128)))
        wanted, scale = wanted.flatten(-2), scale.squeeze(-1)
    else:
        wanted, scale = CASTS[name](x)
    for axis, of in ((-1, x), (-2, x.mT.contiguous())):
        found = quantized(of, cast, axis)
        assert_same(found.values.to(E4M3).float(), wanted.float())
        scale = torch.where(x.reshape(*scale.shape, -1).any(-1), scale, 1.0)
        assert_same(found.scale.reshape(scale.shape), scale)


def test_groups_that_are_not_in_bfloat16_are_multiplied_by_the_inverse():
    """Whose largest magnitudes the scale does not give: to the bit, not within bfloat16."""
    x = torch.randn(64, 256, generator=seeded(0))
    found = quantized(x, ENGINES["sglang_block"].recipe.input)
    scale = found.scale.unsqueeze(-1)
    wanted = in_e4m3(x.unflatten(-1, (-1, 128)) * scale.reciprocal())
    assert_same(found.values, wanted.flatten(-2).float())


def test_the_share_of_values_that_differ_between_engines():
    """As `RULES` states it: quotients of bfloat16 values are often ties."""
    x = torch.randn(1 << 15, 128, generator=seeded(0)).bfloat16().float()
    exact = vllm_token(x)[0].float()
    for other in (sglang_token, sglang_group):
        share = float((other(x)[0].float() != exact).float().mean())
        assert 2e-4 < share < 8e-4


def engine(name):
    return dataclasses.replace(ENGINES[name].recipe, accumulate="exact")


@parametrize("name", ["vllm_row", "vllm_block", "sglang_block"])
def test_products_have_exact_sums(name):
    """Of each group of 128 products, or of all; scales multiply in float32."""
    x = torch.randn(24, 384, generator=seeded(0)).bfloat16()
    w = torch.randn(256, 384, generator=seeded(1)).bfloat16()
    recipe = engine(name)
    a, b = quantized(x, recipe.input), quantized(w, recipe.weight)
    products = a.values.double()[:, None] * b.values.double()
    if recipe.input.scaling == "row":
        wanted = b.scale.mT * (a.scale * products.sum(-1).float())
    else:
        wanted = torch.zeros(24, 256)
        of_w = b.scale.repeat_interleave(128, 0)
        for k, part in enumerate(products.unflatten(-1, (-1, 128)).sum(-1).unbind(-1)):
            factor = a.scale[:, k, None] * of_w[:, k]
            wanted = (wanted.double() + part * factor.double()).float()
    assert_same(linear(x, w, recipe=recipe), wanted.bfloat16())


@parametrize("name", ["vllm_row", "vllm_block", "vllm_block_ue8m0"])
def test_a_row_does_not_depend_on_the_batch(name):
    x = torch.randn(67, 1024, generator=seeded(0)).bfloat16()
    w = torch.randn(256, 1024, generator=seeded(1)).bfloat16()
    whole = linear(x, w, recipe=engine(name))
    for size in (1, 2, 3, 5, 16, 33, 66):
        parts = [linear(part, w, recipe=engine(name)) for part in x.split(size)]
        assert_same(torch.cat(parts), whole)
    order = torch.randperm(67, generator=seeded(2))
    assert_same(linear(x[order], w, recipe=engine(name)), whole[order])


def test_twins():
    """The recipes that docs/tables.md lists as equal to an engine."""
    twins = {row.name: row.twin for row in ENGINES.values()}
    assert twins == {
        "vllm_row": "row_exact",
        "vllm_0_20_row": "row_exact",
        "vllm_static": "",
        "vllm_block": "block_exact",
        "vllm_block_ue8m0": "block",
        "sglang_row": "",
        "sglang_block": "",
    }


class Norm(nn.Module):
    """The RMS norm of transformers' Llama, and of Gemma with ``offset``."""

    def __init__(self, size, eps=1e-6, offset=0.0):
        super().__init__()
        self.scale, self.eps, self.offset = nn.Parameter(torch.ones(size)), eps, offset

    def forward(self, x):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (y * (self.offset + self.scale.float())).to(x.dtype)
        return self.scale * y.to(x.dtype)


class Gated(Norm):
    def forward(self, x, gate):
        return super().forward(x) * gate


@parametrize(
    "norm, found",
    [
        (Norm(64), ("scale", 1e-6, 0.0)),
        (Norm(64, 1e-5, 1.0), ("scale", 1e-5, 1.0)),
        (nn.RMSNorm(64, 1e-6), ("weight", 1e-6, 0.0)),
        (nn.RMSNorm(64), None),
        (Gated(64), None),
        (nn.LayerNorm(64, bias=False), None),
        (nn.LayerNorm(64), None),
        (nn.PReLU(64), None),
        (nn.Linear(64, 64), None),
    ],
)
def test_norms_are_found_by_what_they_compute(norm, found):
    got = rms_norm_of(norm.to(torch.bfloat16))
    assert (got and dataclasses.astuple(got)) == found


def ordered(x, norm, order):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if order == "float32" or norm.offset:
        return (y * (norm.offset + norm.scale.float())).to(x.dtype)
    return y.to(x.dtype) * norm.scale


@parametrize("offset", [0.0, 1.0])
@parametrize("order, name", [("weight", "vllm_row"), ("float32", "vllm_0_20_row")])
def test_norms_in_the_order_of_an_engine(offset, order, name):
    norm = Norm(512, offset=offset).bfloat16()
    nn.init.normal_(norm.scale, 1.0, 0.3, generator=seeded(0))
    x = torch.randn(64, 512, generator=seeded(1)).bfloat16().requires_grad_()
    g = torch.randn(64, 512, generator=seeded(2)).bfloat16()
    before = norm(x)
    wanted = ordered(x, norm, order)
    gradients = torch.autograd.grad(wanted, (x, norm.scale), g)
    assert norms_of_engine(norm, name) is norm
    found = norm(x)
    assert_same(found, wanted)
    assert_same(torch.autograd.grad(found, (x, norm.scale), g), gradients)
    share = float((before != found).float().mean())
    assert (0.2 < share < 0.3) if order == "float32" and not offset else share == 0
    assert_same(norms_of_engine(norm, None)(x), before)
    assert type(norm) is Norm
    assert set(ORDERS) == {row.norms for row in ENGINES.values()}


def branch(m, x):
    y = m.first(x)
    x = x + y
    x += m.second(x)
    return m.norm(x)


def test_norms_that_read_the_sum_before_it_is_rounded():
    """As FlashInfer's FusedAddRMSNorm; the residual stream itself is rounded."""
    linear_of = lambda: nn.Linear(64, 64, bias=False)  # noqa: E731
    model = Net(branch, first=linear_of(), second=linear_of(), norm=Norm(64)).bfloat16()
    x = torch.randn(32, 64, generator=seeded(0)).bfloat16()
    rounded = x + model.first(x)
    second = model.second(rounded)
    exact = rounded.float() + second.float()
    y = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
    norms_of_engine(model, "sglang_row")
    assert_same(model(x), (y * model.norm.scale.float()).bfloat16())
    with refuses("ran outside of its model, as activation checkpointing", RuntimeError):
        model.norm(x)
    norms_of_engine(model, "vllm_row")
    assert_same(model(x), model.norm(rounded + second))


def test_an_unknown_engine():
    with refuses("did you mean 'vllm_row'"):
        norms_of_engine(Norm(4), "vllm_rwo")
    with refuses("norms_of_engine", TypeError):
        norms_of_engine(3, "vllm_row")


def test_sums():
    """Of e4m3 the sums of 2**17 products are exact: float64 holds the largest and the least."""
    w = torch.full((1, 1 << 17), 448.0)
    w[0, -1] = 2.0**-9
    x = w.clone()
    x[0, 1 << 16 : -1] *= -1  # all cancel but one of 448**2 and the last
    recipe = dataclasses.replace(fp8.RECIPES["unit_e4m3"], accumulate="exact")
    x[0, 0] = 0
    assert linear(x, w, recipe=recipe).item() == 2.0**-18
    with refuses("accumulate"):
        dataclasses.replace(recipe, accumulate="exct")
