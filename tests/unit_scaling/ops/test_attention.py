"""Attention: masks, lengths, grouped heads, rotation, caches, and torch.nn.MultiheadAttention."""

import math

import pytest
import torch
from torch import nn

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from fp8.products.attention import is_fused
from tests.shared import (
    assert_close,
    assert_same,
    in_one_graph,
    pairs,
    parametrize,
    refuses,
)
from unit_scaling.ops.attention import attention_with_weights
from unit_scaling.rules.table import OPS

ATTENTION = OPS["scaled_dot_product_attention"]


def qkv(queries, keys, heads=2, kv_heads=2):
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(3, h, n, 4, dtype=torch.float64) for h, n in sizes]


def factor(q, v, shown, **settings):
    """The rule's factor for a mask, by counting: that of the harmonic mean of the numbers of keys
    that queries see. shown: boolean, with a row for each query."""
    if shown is not None:
        counts = [sum(row) for row in shown.flatten(0, -2).tolist() if any(row)]
        if counts == [*range(1, shown.shape[-1] + 1)]:
            settings["is_causal"] = True
        else:
            settings["context_length"] = len(counts) / sum(1 / n for n in counts)
    return ATTENTION.rule(q, v, **settings)["output"]


# --- the function --------------------------------------------------------------------------


def test_attention_to_one_token_returns_its_value():
    q = torch.randn(2, 1, 4)
    assert_same(U.scaled_dot_product_attention(q, q, q, is_causal=True), q)


def test_attention_scale_and_mult():
    q, k, v = qkv(5, 5)
    scaled = U.scaled_dot_product_attention(q, k, v, scale=0.5, mult=3.0)
    assert_close(scaled, U.scaled_dot_product_attention(q, k, v, mult=3.0 * 0.5 * 4))


def test_a_given_context_length_fixes_the_scale():
    sizes, given = (1, 5, 64), {"context_length": 64}
    found = {ATTENTION.scales(qkv(n, n), {}, **given)["output"] for n in sizes}
    assert found == {ATTENTION.scales(qkv(64, 64), {})["output"]}
    with refuses("context_length must be 1 or more, got 0"):
        U.scaled_dot_product_attention(*qkv(2, 2), context_length=0)


def test_is_causal_beside_a_mask_says_that_the_mask_is_causal():
    q, k, v = qkv(3, 7)
    mask = torch.ones(3, 7).bool().tril(diagonal=4)  # three new tokens after four
    plain = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=1 / 4)
    declared = U.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    assert_close(declared, plain * factor(q, v, None, is_causal=True))
    # Queries that see 5, 6 and 7 keys.
    read = U.scaled_dot_product_attention(q, k, v, mask)
    assert_close(read, plain * factor(q, v, mask))


def test_dropout_keeps_the_scale():
    """A uniform average of 64 values, with dropout and without: to five standard errors."""
    q, v = torch.zeros(4096, 1, 8), torch.randn(4096, 64, 8)
    k = torch.zeros_like(v)
    with_dropout = U.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    ratio = with_dropout.norm() / U.scaled_dot_product_attention(q, k, v).norm()
    assert ratio.item() == pytest.approx(1, abs=5 / (2 * with_dropout.numel()) ** 0.5)


OPERANDS = [
    *("fused", "dropout", "three dimensions", "two dimensions", "mask that learns"),
    *("mask by batch", "one head of keys", "narrow values", "grouped heads"),
]


def call(case):
    """Operands and settings. Torch has a fused kernel on a CPU for the first case alone, at least
    before 2.14."""
    allowed = torch.ones(5, 7).bool().tril(2)
    allowed[0] = False  # a row without keys
    term = torch.randn(5, 7, dtype=torch.float64).masked_fill(~allowed, -math.inf)
    full = qkv(5, 7)
    return {
        "fused": (full, {}),
        "dropout": (full, {"dropout_p": 0.3}),
        "three dimensions": ([t.flatten(0, 1) for t in full], {}),
        "two dimensions": ([t[0, 0] for t in full], {"attn_mask": allowed}),
        "mask that learns": (full, {"attn_mask": term.requires_grad_(), "scale": 0.3}),
        "mask by batch": (full, {"attn_mask": allowed.expand(2, 5, 7)}),
        "one head of keys": (qkv(5, 7, kv_heads=1), {}),
        "narrow values": ([*full[:2], full[2][..., :3]], {"is_causal": True}),
        "grouped heads": (qkv(5, 7, heads=4), {"enable_gqa": True, "dropout_p": 0.3}),
    }[case]


@parametrize("case", OPERANDS)
def test_attention_is_torchs_times_the_rule(case):
    """Values and gradients; the gauge of the scores leaves no trace. In float64, with the same
    random numbers."""
    operands, settings = call(case)
    inputs = [t.requires_grad_() for t in operands]
    mask = settings.get("attn_mask")
    shown, learns = mask, inputs
    if case == "mask that learns":
        shown, learns = mask > -math.inf, [*inputs, mask]
    given = {"scale": 1 / 4} | settings
    rule = {k: v for k, v in given.items() if k in ("dropout_p", "is_causal", "scale")}
    s = factor(*inputs[::2], shown, **rule)
    torch.manual_seed(1)
    plain = nn.functional.scaled_dot_product_attention(*inputs, **given)
    torch.manual_seed(1)
    ours = U.scaled_dot_product_attention(*inputs, **given)
    assert_close(ours, plain * s)
    grad = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, learns, grad * s)
    assert_close(torch.autograd.grad(ours, learns, grad), expected)


@parametrize("case", OPERANDS)
def test_where_torch_fuses_attention(case):
    """Torch's own choice is the reference."""
    operands, settings = call(case)
    read = {"attn_mask": None, "dropout_p": 0.0, "enable_gqa": False}
    read |= {name: value for name, value in settings.items() if name in read}
    causal = settings.get("is_causal", False)
    choice = torch._fused_sdp_choice(*operands, is_causal=causal, **read)
    assert is_fused(*operands, **read) == bool(choice)


def test_the_gradient_of_returned_probabilities_has_no_gauge():
    q, k, v = (t.requires_grad_() for t in qkv(5, 7))
    given = (None, 0.0, False, 1.0, None)
    _, weights = attention_with_weights(q, k, v, *given)
    grad = torch.randn_like(weights)
    expected = torch.autograd.grad((q @ k.mT / 4).softmax(-1), (q, k), grad)
    assert_close(torch.autograd.grad(weights, (q, k), grad), expected)


# --- rotary --------------------------------------------------------------------------------


def test_rotary_positions_broadcast():
    x, positions = torch.randn(2, 3, 4, 8), torch.tensor([[5, 6, 7, 8], [0, 1, 2, 3]])
    got = U.rotary(x, positions[:, None])
    assert_close(got[1], U.rotary(x[1]))
    assert_close(got[0], U.rotary(x[0], positions[0]))
    assert U.rotary(x.bfloat16(), torch.tensor([7])).dtype == torch.bfloat16
    with refuses("even number of features, got 5"):
        U.rotary(torch.randn(3, 5))


# --- MHSA and the decoder ------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "rotary": {"rotary_base": 500.0},
    "both": {"kv_heads": 1, "rotary_base": 10000.0},
}
each_variant = parametrize("variant", VARIANTS)


@each_variant
def test_logits_do_not_depend_on_what_follows(variant):
    settings = {"context_length": 64, **VARIANTS[variant]}
    model = uu.TransformerDecoder(32, 11, 2, 4, **settings).eval()
    tokens = torch.randint(11, (2, 24))
    whole = model(tokens)
    for length in (1, 2, 9):
        assert_close(model(tokens[:, :length]), whole[:, :length])


@parametrize("heads, kv_heads", [(3, None), (4, 3)])
def test_numbers_of_heads_that_do_not_divide_are_refused(heads, kv_heads):
    with refuses(r"heads must divide .*: got 3"):
        uu.MHSA(16, heads, is_causal=True, kv_heads=kv_heads)


# --- MultiheadAttention --------------------------------------------------------------------

ARGUMENTS = {
    "self": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "widths": {"kdim": 6, "vdim": 10},
    "all": {"bias": False, "kdim": 6, "batch_first": True},
}


MASKED = "no,padding,both,hint and padding,heads,biases,causal,no hint".split(",")


@torch.no_grad()
def oracle(ours, arguments, keys, shown):
    """torch's module, in float64, with the weights that make it the same function.

    Projections are scaled by 1/sqrt(fan-in); torch divides logits by sqrt(width), we by width; the
    output of attention has the rule's factor. shown: the keys that each query sees.
    """
    plain = nn.MultiheadAttention(8, 2, **arguments, dtype=torch.float64)
    plain.load_state_dict(ours.state_dict())
    head = torch.empty(1, 1, keys, ours.head_dim)
    for p in plain.parameters(recurse=False):
        if p.dim() == 2:
            p /= p.shape[1] ** 0.5
    fused = plain.in_proj_weight
    (plain.q_proj_weight if fused is None else fused)[:8].div_(ours.head_dim**0.5)
    plain.out_proj.weight *= factor(head, head, shown) / 8**0.5
    # One vector for projections of different fan-ins.
    if plain.in_proj_bias is not None:
        fan_ins = (8, ours.kdim, ours.vdim)
        for part, fan_in in pairs(plain.in_proj_bias.chunk(3), fan_ins):
            part /= fan_in**0.5
        plain.in_proj_bias[:8] /= ours.head_dim**0.5
        plain.out_proj.bias /= 8**0.5
    return plain


@parametrize("name", ARGUMENTS)
@parametrize("masked", MASKED)
@parametrize("need_weights", [True, False])
def test_multihead_attention(name, masked, need_weights):
    arguments = ARGUMENTS[name]
    module = uu.MultiheadAttention(8, 2, **arguments, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()  # biases too
    square = name == "self" or masked in ("causal", "no hint")
    length, keys, batch = 5, 5 if square else 4, 3
    query = torch.randn(length, batch, 8).double()
    key = torch.randn(keys, batch, arguments.get("kdim", 8)).double()
    value = torch.randn(keys, batch, arguments.get("vdim", 8)).double()
    inputs = (query,) * 3 if name == "self" else (query, key, value)
    inputs = [x.transpose(0, 1) for x in inputs] if module.batch_first else inputs
    # One key more in each example.
    padded = torch.arange(keys) > torch.arange(batch)[:, None]
    hidden = torch.rand(length, keys) < 0.3
    hidden[:, 0] = False
    causal = torch.ones(length, keys).bool().triu(1)
    heads = torch.randn(2 * batch, length, keys).double()
    hinted = {"attn_mask": causal, "is_causal": True}
    masks = {
        "no": {},
        "padding": {"key_padding_mask": padded},
        "both": {"key_padding_mask": padded, "attn_mask": hidden},
        "hint and padding": {"key_padding_mask": padded, **hinted},
        "heads": {"attn_mask": heads.masked_fill(hidden, -math.inf)},
        "biases": {"attn_mask": heads},
        "causal": hinted,
        "no hint": {"attn_mask": causal},
    }[masked]
    shown = torch.ones(length, keys).bool()
    if "attn_mask" in masks:
        mask = masks["attn_mask"]
        shown = ~mask if mask.dtype == torch.bool else mask[0] > -math.inf
    if "key_padding_mask" in masks:
        shown = shown & ~padded[:, None]
    plain = oracle(module, arguments, keys, shown)
    for average in (True, False) if need_weights else (True,):
        settings = {"need_weights": need_weights, "average_attn_weights": average}
        settings |= masks
        assert_close(module(*inputs, **settings), plain(*inputs, **settings))


def test_multihead_attention_without_a_batch():
    module = uu.MultiheadAttention(8, 2)
    x = torch.randn(5, 8)
    padding = torch.tensor([False, False, True, False, False])
    one = module(x, x, x, key_padding_mask=padding)
    many = module(*[x[:, None]] * 3, key_padding_mask=padding[None])
    assert_close(one[0], many[0].squeeze(1))
    assert_close(one[1], many[1].squeeze(0))
    assert one[1].shape == (5, 5)


def test_multihead_attention_dropout_and_errors():
    module, x = uu.MultiheadAttention(8, 2, dropout=0.5), torch.randn(6, 3, 8)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert_same(module(x, x, x)[0], module(x, x, x)[0])
    for setting in ("add_bias_kv", "add_zero_attn"):
        with refuses("add_bias_kv and add_zero_attn have no", NotImplementedError):
            uu.MultiheadAttention(8, 2, **{setting: True})
    with refuses("is_causal is a hint about attn_mask"):
        module(x, x, x, is_causal=True)
    with refuses(r"key_padding_mask must have shape \(3, 6\), not \(6, 3\)"):
        module(x, x, x, key_padding_mask=torch.zeros(6, 3).bool())


@parametrize("need_weights", [True, False])
def test_multihead_attention_compiled_and_in_low_precision(need_weights):
    module, x = uu.MultiheadAttention(32, 4), torch.randn(6, 2, 32)

    def run(x):
        return module(x, x, x, need_weights=need_weights)[0]

    compiled = in_one_graph(run)
    assert_close(compiled(x), run(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(x).dtype == torch.bfloat16
    with fp8.autocast("unit"):
        low = run(x)
    # Three products in a row, each off by 0.05 in RMS: its two operands by 1/16 at most, evenly.
    assert 0.01 < (low - run(x)).norm() / low.norm() < 3 * 0.05
