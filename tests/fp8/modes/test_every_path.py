"""One result on every path: eager, compiled, checkpointed, converted, pickled, from JSON."""

import dataclasses
import functools
import json
import pickle

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import Cast, Recipe
from tests.fp8.blocks import block, keeper
from tests.shared import Net, in_one_graph, pairs, parametrize, sampled

WIDTH = 32


def attention(m, x):
    """The products inside are composed in one half of the heads."""
    q, k, v = (
        t.unflatten(-1, (4, 8)).transpose(1, 2) for t in m.project(x).chunk(3, dim=-1)
    )
    fused = nn.functional.scaled_dot_product_attention(
        q[:, :2], k[:, :2], v[:, :2], is_causal=True
    )
    composed = (q[:, 2:] @ k[:, 2:].mT * 8**-0.5).softmax(-1) @ v[:, 2:]
    return x + m.out(torch.cat([fused, composed], 1).transpose(1, 2).flatten(2))


def products(m, x):
    """Products of parameters by other functions than linear, one parameter in two of them."""
    y = torch.addmm(m.bias, x.flatten(0, 1), m.weight).view_as(x)
    y = y + torch.tanh(x) @ m.weight.mT
    y = y + torch.einsum("bld,hde->bhle", x, m.heads).mean(1)
    return x + m.mix @ y


def convolutions(m, x):
    return x + m.second(nn.functional.gelu(m.first(x.mT))).mT


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        Net(
            products,
            weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5),
            bias=nn.Parameter(torch.zeros(WIDTH)),
            heads=nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5),
            mix=nn.Parameter(torch.randn(8, 8) / 8**0.5),
        ),
        Net(
            attention,
            project=nn.Linear(WIDTH, 3 * WIDTH),
            out=nn.Linear(WIDTH, WIDTH, bias=False),
        ),
        nn.LayerNorm(WIDTH),
        Net(
            convolutions,
            first=nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4),
            second=nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1, bias=False),
        ),
    )


def step(model, run):
    """The loss and all gradients of two passes."""
    torch.manual_seed(1)
    found = []
    for x in torch.randn(2, 2, 8, WIDTH):
        x.requires_grad_()
        loss = run(model, x).square().mean()
        found += [loss.detach(), *torch.autograd.grad(loss, (x, *model.parameters()))]
    return found


def under(recipe, inner):
    """``inner`` in a block, whose products keep their scales in one layer."""
    layer = keeper(recipe) if recipe.keeps_history else None

    def run(model, x):
        with block(recipe, layer=layer):
            return inner(model, x)

    return run


def plain(model, x):
    return model(x)


def checkpointed(model, x, **how):
    for part in model:
        x = checkpoint(part, x, use_reentrant=False, **how)
    return x


def compiled(run):
    torch._dynamo.reset()
    return in_one_graph(run)


CASTS = (
    *("input", "weight", "grad"),
    *("grad_input_weight", "grad_weight_grad", "grad_weight_input"),
)
OWN_SUMS = {name: r for name, r in fp8.RECIPES.items() if r.accumulate is None}


def is_random(recipe):
    """Whether the numbers that it draws depend on the order of the backward pass."""
    return any(cast.is_random for cast in recipe.casts if cast is not None)


def in_float16(cast):
    """With its rotation and rounding, and a format whose errors are small."""
    if not isinstance(cast, Cast):  # "same"
        return cast
    scaling = {"scaling": "tensor", "rule": None, "tile": None}
    return dataclasses.replace(cast, format="fp16", **scaling)


@sampled(6)
@parametrize("name", OWN_SUMS)
def test_a_recipe(name):
    recipe = OWN_SUMS[name]
    again = functools.partial(checkpointed, context_fn=fp8.checkpoint_contexts)
    read = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    expected = step(net(), under(recipe, plain))
    paths = {"pickled": (pickle.loads(pickle.dumps(net())), under(recipe, plain))}
    paths["from JSON"] = net(), under(read, plain)
    stateless = not recipe.keeps_history  # else the first pass is eager, and whole
    if stateless and not is_random(recipe):
        paths["compiled"] = net(), compiled(under(recipe, plain))
    if stateless:
        paths["checkpointed"] = net(), under(recipe, again)
    for path, (model, run) in paths.items():
        for ours, theirs in pairs(step(model, run), expected):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), path


@sampled(6)
@parametrize("name", [n for n, r in OWN_SUMS.items() if is_random(r)])
def test_random_numbers_of_a_graph(name):
    """Both operands of a product have the same signs, however a graph is divided."""
    recipe = OWN_SUMS[name]
    casts = {n: in_float16(getattr(recipe, n)) for n in CASTS}
    run = compiled(under(Recipe(name="precise", **casts), plain))
    for ours, true in pairs(step(net(), run), step(net(), plain)):
        assert (ours - true).norm() <= 0.01 * true.norm()
