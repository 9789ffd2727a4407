import itertools
from contextlib import nullcontext

import torch
from torch import nn

import fp8
from tests.fp8.compare import outcome
from tests.shared import assert_close, normal, pairs, parametrize, randn, refuses

L, S, N, H, E = 4, 5, 3, 2, 8
NOTHING = fp8.Recipe(name="nothing")  # the expansion alone


def masks(length=L, keys=S):
    """(attn_mask, key_padding_mask) of every kind; each query keeps a key."""
    boolean = torch.ones(length, keys).triu(2).bool()
    padding = torch.zeros(N, keys, dtype=torch.bool)
    padding[0, -1] = padding[1, 2] = True
    additive = normal(length, keys)
    return {
        "none": (None, None),
        "boolean": (boolean, None),
        "additive": (additive, None),
        "each head": (boolean.expand(N * H, -1, -1).clone(), None),
        "each head, additive": (normal(N * H, length, keys), None),
        "padding": (None, padding),
        "padding, additive": (None, padding.float() * -2),
        "both boolean": (boolean, padding),
        "both additive": (additive, padding.float() * -2),
        "both, each head": (boolean.expand(N * H, -1, -1).clone(), padding),
    }


def both(layer, recipe, *args, **kwargs):
    """Output, weights and gradients in plain torch, then under the recipe."""
    results = []
    for block in (nullcontext(), fp8.autocast(recipe)):
        inputs = [a.detach().clone().requires_grad_() for a in args]
        torch.manual_seed(0)
        with block:
            out, weights = layer(*inputs, **kwargs)
        leaves = [*inputs, *layer.parameters()]
        results.append([*outcome(lambda y=out: y, leaves), weights])
    return results


def layer(**kwargs):
    torch.manual_seed(1)
    result = nn.MultiheadAttention(E, H, **kwargs)
    for name, p in result.named_parameters():
        if "bias" in name:
            nn.init.normal_(p)
    return result


@parametrize("need_weights", [True, False])
@parametrize("kind", masks())
def test_masks(kind, need_weights):
    attn_mask, padding = masks()[kind]
    kwargs = {
        "attn_mask": attn_mask,
        "key_padding_mask": padding,
        "need_weights": need_weights,
    }
    query, memory = randn(L, N, E), randn(S, N, E)
    assert_close(*both(layer(), NOTHING, query, memory, memory, **kwargs))
    plain, cast = both(layer(), fp8.RECIPES["unit"], query, memory, memory, **kwargs)
    for one, other in pairs(plain, cast):
        assert (one is None and other is None) or not torch.equal(one, other)


@parametrize(
    "options, shapes",
    [
        ({}, [(L, N, E)] * 3),
        ({"batch_first": True}, [(N, L, E), (N, S, E), (N, S, E)]),
        ({"kdim": 6, "vdim": 5, "bias": False}, [(L, N, E), (S, N, 6), (S, N, 5)]),
        ({}, [(L, E), (S, E), (S, E)]),
        ({"dropout": 0.5}, [(L, N, E), (S, N, E), (S, N, E)]),
    ],
)
def test_layers(options, shapes):
    attention = layer(**options).eval()
    args = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    for need_weights, average in itertools.product((True, False), repeat=2):
        kwargs = {"need_weights": need_weights, "average_attn_weights": average}
        assert_close(*both(attention, NOTHING, *args, **kwargs))


def test_dropout():
    """Of the probabilities, in training only; with p=1 nothing is left but the bias."""
    attention, x = layer(dropout=1.0), randn(L, N, E)
    for need_weights in (True, False):
        with fp8.autocast(NOTHING):
            out, _ = attention(x, x, x, need_weights=need_weights)
        assert torch.equal(out, attention.out_proj.bias.expand_as(out))
    halved = layer(dropout=0.5)
    with fp8.autocast(NOTHING), torch.no_grad():
        torch.manual_seed(3)
        _, weights = halved(x, x, x, average_attn_weights=False)
        _, kept = halved.eval()(x, x, x, average_attn_weights=False)
    dropped = weights == 0
    assert 0.2 < dropped.float().mean() < 0.8
    assert_close(weights[~dropped], 2 * kept[~dropped])


@parametrize("need_weights", [True, False])
@parametrize("padded", [True, False])
def test_causal_hint(need_weights, padded):
    x, causal = randn(L, N, E), torch.ones(L, L).triu(1).bool()
    padding = None
    if padded:
        padding = torch.zeros(N, L, dtype=torch.bool)
        padding[1, -1] = True
    kwargs = {
        "is_causal": True,
        "need_weights": need_weights,
        "key_padding_mask": padding,
    }
    assert_close(*both(layer(), NOTHING, x, x, x, attn_mask=causal, **kwargs))
    with fp8.autocast(NOTHING), refuses("give the mask as well"):
        layer()(x, x, x, **kwargs)


@parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_is_not_expanded_is_refused_by_name(options):
    x, name = (
        randn(L, N, E),
        "bias_k, bias_v" if "add_bias_kv" in options else "add_zero_attn",
    )
    with fp8.autocast("unit"), refuses(name, NotImplementedError):
        layer(**options)(x, x, x)


def test_masks_of_another_shape_are_refused():
    x = randn(L, N, E)
    for mask in (torch.zeros(L, L + 1), torch.zeros(N, L, L), torch.zeros(L)):
        with fp8.autocast("unit"), refuses(r"attn_mask must have shape \(4, 4\)"):
            layer()(x, x, x, attn_mask=mask)
    with fp8.autocast("unit"), refuses(r"key_padding_mask must have shape"):
        layer()(x, x, x, key_padding_mask=torch.zeros(L, N))
