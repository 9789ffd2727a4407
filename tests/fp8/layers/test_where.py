"""Published policies, and functions that choose layers."""

import copy
from fnmatch import fnmatch

import pytest
import torch
from torch import nn

import fp8
from fp8 import Policy
from fp8.adapters import torchao
from fp8.training.fsdp import gather_in_fp8
from fp8.warnings import ConvertWarning
from notebooks.nanogpt.model import GPT, GPTConfig
from tests.fp8.adapters.hub_models import gpt2, llama
from tests.shared import Net, assert_close, linears, parametrize, paths, refuses, warns


def encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
    )


def nanogpt():
    return GPT(GPTConfig(vocab=32, width=32, layers=2, context=16))


def flat():
    """Attention and MLP written into the block itself."""
    layers = {name: nn.Linear(32, 32) for name in "qkvo"}
    block = Net(**layers, up=nn.Linear(32, 64), down=nn.Linear(64, 32))
    blocks = nn.Sequential(block, copy.deepcopy(block))
    return nn.Sequential(nn.Embedding(9, 32), blocks, nn.Linear(32, 9))


def mlp():
    return linears(32, 64, nn.GELU, 32, 5)


def experts():
    """A list of blocks in each block."""
    expert = Net(up=nn.Linear(32, 64), down=nn.Linear(64, 32))
    both = nn.ModuleList([expert, copy.deepcopy(expert)])
    block = Net(router=nn.Linear(32, 2), experts=both)
    return Net(blocks=nn.ModuleList([block]), head=nn.Linear(32, 9))


# Model -> what is outside of the blocks, what joins the residual stream.
PATTERNS = {
    gpt2: (["lm_head"], ["*.c_proj"]),
    llama: (["lm_head"], ["*.o_proj", "*.down_proj"]),
    encoder: ([], ["*.self_attn", "*.linear2"]),
    nanogpt: (["head"], ["*.out", "*.down"]),
    flat: (["2"], ["*.o", "*.down"]),
    mlp: (["3"], []),
    experts: (["head"], ["*.down"]),
}


def any_of(name, patterns):
    return any(fnmatch(name, pattern) for pattern in patterns)


@parametrize("policy", [Policy.hidden, Policy.umup])
@parametrize("make", PATTERNS)
def test_published_policies(make, policy):
    outside, joining = PATTERNS[make]
    if policy is Policy.umup:
        outside = outside + joining
    if policy is Policy.umup and make is mlp:
        with refuses(r"role 'residual' is not found in this Sequential"):
            fp8.convert(make(), policy("unit"))
        return
    model = fp8.convert(make(), policy("unit", others="bf16"))
    rows = [row for row in fp8.report(model) if not row.left_alone]
    assert rows
    for row in rows:
        assert row.why.startswith("bf16" if any_of(row.path, outside) else "unit"), row
    left = paths(fp8.report(fp8.convert(model, policy("unit"))), "left alone")
    assert left >= {row.path for row in rows if any_of(row.path, outside)}


@parametrize("recipe", ["tensor", "block"])
def test_a_layer_of_gpt2_is_a_linear_layer(recipe):
    """Its weight is stored as (in, out), and cast as the weight (out, in) that it is."""
    layer = gpt2().transformer.h[0].mlp.c_fc
    plain = nn.Linear(32, 128)
    plain.weight, plain.bias = nn.Parameter(layer.weight.detach().T), layer.bias
    x = torch.randn(2, 5, 32, requires_grad=True)
    results = []
    for module in (fp8.convert(layer, recipe), fp8.convert(plain, recipe)):
        y = module(x)
        grads = torch.autograd.grad(y.square().sum(), [x, module.weight, module.bias])
        results.append(
            [y, grads[0], grads[1].T if module is plain else grads[1], grads[2]]
        )
    assert_close(*results)
    assert "Conv1D" in repr(fp8.revert(layer))


# --- Functions


@parametrize(
    "where, message",
    [
        ("all", r"where is a str; give \(name, module\) -> bool"),
        (3, "where is a int"),
        (lambda name: True, r"takes 1 positional argument but 2 were given"),
        (lambda name, layer: 1, "where must return a bool, got 1 for layer '0'"),
        (lambda name, layer: None, "where must return a bool, got None"),
    ],
)
def test_other_choices_are_refused_and_change_nothing(where, message):
    model = fp8.convert(mlp(), "row")
    for call in (fp8.convert, fp8.store_frozen, gather_in_fp8, torchao.convert):
        with refuses(message, TypeError):
            call(model.requires_grad_(False), where=where)
    converted = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert {layer.fp8_recipe.name for layer in converted} == {"row"}


def never(name, layer):
    return False


def with_norm():
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).requires_grad_(False)


CHOOSE = {
    "convert": lambda model: fp8.convert(model, "tensor", where=never),
    "torchao": lambda model: torchao.convert(model, "tensor", where=never),
    "store_frozen": lambda model: fp8.store_frozen(model, where=never),
    "norms": lambda model: fp8.apply_low_precision_layernorm(
        model, "amp_bf16", where=never
    ),
    "gather_in_fp8": lambda model: gather_in_fp8(model, where=never),
}


@parametrize("before", [False, True])
@parametrize("name", CHOOSE)
def test_a_choice_of_nothing_warns_each_time(name, before):
    """Also of a model that was converted before: its layers are reverted."""
    model = with_norm()
    if before and name != "gather_in_fp8":
        fp8.convert(model, "tensor")
    for _ in range(2):
        with warns("no", ConvertWarning) as seen:
            CHOOSE[name](model)
        assert [warning.filename for warning in seen] == [__file__]


NOTHING = {
    "no layer of the Sequential .*not chosen": lambda: fp8.convert(
        mlp(), "tensor", where=lambda name, layer: name == "up"
    ),
    "bf16": lambda: fp8.convert(linears(4, 4), Policy.hidden("tensor", others="bf16")),
    "none has a weight": lambda: fp8.convert(nn.Sequential(nn.GELU())),
    r"a lookup, not a product \(1\)": lambda: fp8.initialize(
        nn.Sequential(nn.Embedding(4, 4)), None, "O1"
    ),
}


@parametrize("message", NOTHING)
def test_a_conversion_that_changes_nothing_warns(message):
    with warns(message, ConvertWarning) as seen:
        NOTHING[message]()
    assert [warning.filename for warning in seen] == [__file__]
    with fp8.strict(), pytest.raises(ConvertWarning):
        NOTHING[message]()
