"""Measurements of products, gradients and kept bytes, for the rows of `docs.papers.NUMBERS`."""

import contextlib
import dataclasses
import functools

import torch
from torch import nn

import fp8
from tests.published.tensors import GUARDED, NVFP4, in_units, measured, normal
from tests.reference import rotation
from tests.shared import pairs

COUNTS = (1, 4, 16, 64)


def run_under(recipe):
    """Under the recipe, or as it is."""
    return fp8.autocast(recipe) if recipe else contextlib.nullcontext()


def squared_errors(draws, exact, counts=COUNTS):
    """For each count the relative squared errors of means of so many draws."""
    draws, exact = draws.double(), exact.double()
    means = [draws.unflatten(0, (-1, count)).mean(1) - exact for count in counts]
    return [mean.square().mean((1, 2)) / exact.square().mean() for mean in means]


def bits(errors):
    """-log2 of the relative error."""
    return [float(-0.5 * error.mean().log2()) for error in errors]


def two_way(cast, forward=None):
    """``cast`` for both operands of both gradients."""
    return fp8.Recipe(
        name="backward",
        input=forward,
        weight=forward,
        grad=cast,
        grad_input_weight=cast,
        grad_weight_input=cast,
    )


def averages(cast, counts):
    """Of products of (128, 256) by (256, 128). The mean square of 16,384 results has a standard
    error of (2 / 16384)**0.5, and that of the errors too: 0.011 bits together."""
    x, w = normal(128, 256), normal(128, 256, seed=1)
    torch.manual_seed(0)
    with fp8.autocast(two_way(cast, cast)):
        draws = torch.stack([nn.functional.linear(x, w) for _ in range(counts[-1])])
    found = bits(squared_errors(draws, x @ w.mT, counts))
    return measured(found, [0.0113] * len(found))


def better_of_two(x):
    """As the published code of Quartet II: each block rounded stochastically under both scales, and
    of these the one with the smaller error."""
    blocks, scales, unit = in_units(x, 17 / 16)
    found = []
    for factor in (1.0, 1.5):
        scale = fp8.quantize(scales * factor, "e4m3")
        found.append(
            fp8.quantize(blocks / scale, "e2m1", rounding="stochastic") * scale
        )
    six, four = ((y - blocks).square().sum(-1, keepdim=True) for y in found)
    return torch.where(six <= four, *found).flatten(-2) * unit


def four_over_six_emulated():
    """As `averages`."""
    x, w = normal(128, 256), normal(128, 256, seed=1)
    matrix = rotation(128).float()
    torch.manual_seed(0)

    def product(cast):
        signs = torch.randint(0, 2, (128,)) * 2.0 - 1
        a, b = (
            ((t.unflatten(1, (-1, 128)) * signs) @ matrix).flatten(1) for t in (x, w)
        )
        return cast(a) @ cast(b).mT

    draws = torch.stack([product(better_of_two) for _ in range(COUNTS[-1])])
    found = bits(squared_errors(draws, x @ w.mT))
    return measured(found, [0.0113] * len(found))


@functools.cache
def quartet2():
    """Bits of the gradients of input and weight; forward in float32, as in the notebook. Their
    standard errors: the deviation between groups of draws, which is that of the published run."""
    cast = fp8.RECIPES["quartet2"].grad
    assert cast is not None
    torch.manual_seed(0)
    x = torch.randn(384, 256, requires_grad=True)
    layer, head = nn.Linear(256, 256, bias=False), nn.Linear(256, 1)
    target = torch.randn(384, 1)

    def gradients(recipe):
        with run_under(recipe):
            y = layer(x)
        return torch.autograd.grad(
            (head(y) - target).square().mean(), (x, layer.weight)
        )

    exact = gradients(None)
    draws = pairs(*(gradients(two_way(cast)) for _ in range(COUNTS[-1])))
    found = []
    for of, true in pairs(draws, exact):
        errors = squared_errors(torch.stack(of), true)
        spread = float((-0.5 * errors[0].log2()).std())  # of one draw, as of one mean
        ours = [spread / len(error) ** 0.5 for error in errors]
        found.append(measured(bits(errors), ours, [spread] * len(errors)))
    return found[0], found[1]


def concentration():
    """The first weight of two layers. NVIDIA's recipe as the published code has it: signs are
    drawn anew for each product, and the scales of stochastic casts are guarded. Standard errors:
    of 16,384 squared errors, which a few directions of the gradient dominate: 2 %."""
    torch.manual_seed(1)
    parts = [
        (nn.Linear(128, 128, bias=False), nn.GELU(), nn.LayerNorm(128))
        for _ in range(2)
    ]
    model = nn.Sequential(*(module for part in parts for module in part))
    x, weight = torch.randn(128, 128), parts[0][0].weight

    def gradient(recipe):
        with run_under(recipe):
            y = model(x)
        return torch.autograd.grad(
            nn.functional.cross_entropy(y, torch.arange(128)), weight
        )[0]

    exact, found = gradient(None), []
    for cast in (GUARDED, dataclasses.replace(GUARDED, rule="e4m3_4_6")):
        turn = {"hadamard": 16, "signs": "random"}
        recipe = fp8.Recipe(
            name="backward",
            grad=cast,
            grad_weight_grad=dataclasses.replace(cast, **turn),
            grad_weight_input=dataclasses.replace(NVFP4, **turn),
        )
        draws = torch.stack([gradient(recipe) for _ in range(COUNTS[-1])])
        one, *_, last = squared_errors(draws, exact)
        found.append(COUNTS[-1] * float(last.mean() / one.mean()))
    return measured(found, [0.02 * r for r in found])


WIDTH, TOKENS = 192, 64


def kept(recipe):
    """Bytes of a Llama block of transformers in BF16, without those of the weights, which do not
    grow with the tokens, and without numbers for each token. The published table cuts its digits:
    0.005 more."""
    from transformers.models.llama import LlamaConfig, modeling_llama

    sizes = {"hidden_size": WIDTH, "num_attention_heads": 3}
    inner = 512  # 8/3 of the width, as in the table
    config = LlamaConfig(**sizes, intermediate_size=inner, attn_implementation="sdpa")
    block = modeling_llama.LlamaDecoderLayer(config, 0).bfloat16()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    angles = modeling_llama.LlamaRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    held = {}

    def keep(t):
        if t.shape not in shapes and t.numel() >= x.numel():
            held.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    weights = [p for p in block.parameters() if p.dim() > 1]
    shapes = {p.shape for p in weights} | {p.mT.shape for p in weights}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), run_under(recipe):
        block(x.clone(), position_embeddings=angles)
    size = sum(t.untyped_storage().nbytes() for t in held.values())
    return measured([size / (2 * x.numel())], [0.0], [0.001])


FOUR_OVER_SIX = dataclasses.replace(
    GUARDED, rule="e4m3_4_6", hadamard=128, signs="random"
)

MEASURES = {
    "averages": lambda: averages(GUARDED, (*COUNTS, 256)),
    "four_over_six_averages": lambda: averages(FOUR_OVER_SIX, COUNTS),
    "four_over_six_emulated": four_over_six_emulated,
    "quartet2_input": lambda: quartet2()[0],
    "quartet2_weight": lambda: quartet2()[1],
    "concentration": concentration,
    "activations": lambda: kept(None),
    "activations_fp8": lambda: kept(fp8.RECIPES["tensor"]),
}
