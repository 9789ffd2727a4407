"""`fp8.convert`: the same model, whose layers run under a recipe; and back."""

import inspect

import pytest
import torch
from torch import nn

import fp8
from fp8 import RECIPES
from fp8.layers.select import LAYERS
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    by_path,
    filterwarnings,
    linears,
    pairs,
    parametrize,
    tied,
    warns,
)

# Layer -> (constructor, input).
MAKE = {
    nn.Linear: (lambda: nn.Linear(8, 16), (4, 8)),
    nn.Conv1d: (lambda: nn.Conv1d(8, 16, 3), (2, 8, 6)),
    nn.Conv2d: (lambda: nn.Conv2d(8, 16, 3), (2, 8, 6, 6)),
    nn.Conv3d: (lambda: nn.Conv3d(8, 16, 3), (2, 8, 4, 4, 4)),
    nn.ConvTranspose1d: (lambda: nn.ConvTranspose1d(8, 16, 3), (2, 8, 6)),
    nn.ConvTranspose2d: (lambda: nn.ConvTranspose2d(8, 16, 3), (2, 8, 6, 6)),
    nn.ConvTranspose3d: (lambda: nn.ConvTranspose3d(8, 16, 3), (2, 8, 4, 4, 4)),
    nn.MultiheadAttention: (lambda: nn.MultiheadAttention(8, 2), (5, 2, 8)),
}


def inputs_of(kind):
    torch.manual_seed(1)
    x = torch.randn(MAKE[kind][1])
    return (x, x, x) if kind is nn.MultiheadAttention else (x,)


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.fixture
def model():
    """Two names for one layer, a tied weight, a frozen one, a weight without a layer."""
    a = nn.Linear(8, 8)
    return tied(
        Net(
            lambda m, tokens: m.head(m.norm(m.b(m.a(m.embed(tokens)))) @ m.own),
            embed=nn.Embedding(32, 8),
            a=a,
            b=a,
            frozen=nn.Linear(8, 8).requires_grad_(False),
            norm=nn.LayerNorm(8),
            own=nn.Parameter(torch.randn(8, 8)),
            head=nn.Linear(8, 32, bias=False),
        )
    )


TOKENS = torch.arange(12).view(3, 4)


@filterwarnings("ignore:.* has no sums of accumulate")
@parametrize(
    "kind, recipe",
    [
        *((kind, recipe) for kind in LAYERS for recipe in ("tensor", "mxfp8")),
        *((nn.Linear, n) for n, recipe in RECIPES.items() if not recipe.keeps_history),
    ],
)
def test_a_converted_layer_computes_what_autocast_does(kind, recipe):
    layer, inputs = MAKE[kind][0](), inputs_of(kind)
    plain = first(layer(*inputs))
    torch.manual_seed(2)  # for stochastic rounding and random rotations
    with fp8.autocast(recipe):
        want = first(layer(*inputs))
    want_grads = torch.autograd.grad(want.square().sum(), list(layer.parameters()))
    assert fp8.convert(layer, recipe) is layer
    torch.manual_seed(2)
    got = first(layer(*inputs))
    grads = torch.autograd.grad(got.square().sum(), list(layer.parameters()))
    assert_same(got, want)
    assert torch.equal(got, plain) == (RECIPES[recipe].forward == (None, None))
    assert_same(grads, want_grads)
    fp8.revert(layer)
    assert type(layer) is kind
    assert_same(first(layer(*inputs)), plain)


def test_the_model_stays_itself(model):
    optimizer = torch.optim.AdamW(model.parameters())
    before = list(model.state_dict(keep_vars=True).items())
    calls = []
    model.a.register_forward_hook(lambda *_: calls.append("a"))
    signature = inspect.signature(model.a.forward)
    fp8.convert(model, "unit")
    after = list(model.state_dict(keep_vars=True).items())
    assert all(k == n and p is q for (k, p), (n, q) in pairs(before, after))
    assert isinstance(model.a, nn.Linear)
    assert model.a is model.b
    assert model.head.weight is model.embed.weight
    assert not model.frozen.weight.requires_grad
    assert inspect.signature(model.a.forward) == signature
    assert "fp8=unit" in repr(model.a)
    model(TOKENS).sum().backward()
    assert calls == ["a", "a"]
    weight = model.a.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.a.weight, weight)


def test_the_report_has_every_layer(model):
    where = lambda name, layer: name != "frozen"  # noqa: E731
    fp8.convert(model, "unit", backend="simulate", where=where)
    own = "its products are its own: run the model under fp8.autocast"
    assert by_path(fp8.report(model), "what", "done", "why") == {
        "": ("Net", "left alone", own),
        "embed": ("Embedding", "left alone", "a lookup, not a product"),
        "a": ("Linear", "converted", "unit"),
        "frozen": ("Linear", "left alone", "not chosen"),
        "head": ("Linear", "converted", "unit"),
    }
    assert len(fp8.report(model).left_alone) == 3
    others = fp8.convert(Net(attn=nn.MultiheadAttention(8, 2), r=nn.LSTM(8, 8)))
    rows = by_path(fp8.report(others), "why")
    assert rows["attn.out_proj"] == "computed by attn"
    assert rows["r"] == "one kernel computes all its products"


def test_the_fast_path_of_an_encoder_does_not_skip_its_layers():
    """What it computes besides them is in high precision, or under the recipe of a block."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 4, 16)
    plain, select = model(x), lambda name, layer: name.endswith("linear1")
    with fp8.autocast("unit"):
        cast = model(x)
    fp8.convert(model, fp8.Recipe(name="none"), where=select)
    assert_close(model(x), plain)
    fp8.convert(model, "unit", where=select)
    calls = []
    model.layers[0].linear1.register_forward_hook(lambda m, a, y: calls.append(y))
    with torch.no_grad():
        got = model(x)
    assert len(calls) == 1
    with fp8.autocast("unit"):
        assert_same(model(x), cast)
    assert not torch.equal(fp8.revert(model)(x), got)
    assert type(model) is nn.TransformerEncoder


def test_a_layer_with_another_forward_is_left_alone():
    """As hooks of other libraries set it: what they call is the forward that was there before."""
    model = linears(8, 8, 8)
    model[0].forward = lambda x, forward=model[0].forward: forward(x)
    rows = fp8.report(fp8.convert(model))
    assert [row.done for row in rows] == ["left alone", "converted"]
    assert "forward was replaced" in rows[0].why


@parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_attention_with_more_keys_is_left_alone(options):
    with warns("not supported", fp8.warnings.ConvertWarning):
        model = fp8.convert(nn.Sequential(nn.MultiheadAttention(8, 2, **options)))
    assert fp8.report(model)[0].why == "add_bias_kv and add_zero_attn are not supported"
    x = torch.randn(3, 2, 8)
    assert model[0](x, x, x)[0].shape == x.shape


def test_a_stored_weight_is_no_layer_that_was_not_chosen():
    model = linears(16, 16, 16)
    model[0].requires_grad_(False)
    rows = fp8.report(fp8.store_frozen(model))
    assert [row.left_alone for row in rows] == [True, True]
    stored = "frozen: its weight is stored in e4m3, its products are not cast"
    assert [row.why for row in rows] == [stored, "not chosen"]


@parametrize("recipe", "tensor nvfp4 delayed static".split())
def test_shapes_on_the_meta_device(recipe):
    with torch.device("meta"):
        model = fp8.convert(linears(32, 16, 8), recipe)
        y = model(torch.empty(4, 32))
    y.sum().backward()
    assert y.shape == (4, 8)
    assert model[0].weight.grad.shape == (16, 32)
