"""`where=` by name: which layers of a model the published choices pick, and what the rest gets."""

from __future__ import annotations

import copy
from fnmatch import fnmatch

import pytest
import torch
from torch import nn

import fp8
from fp8.selection.where import WHERE
from notebooks.nanogpt.model import GPT, GPTConfig

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
TOKENS = {"bos_token_id": None, "eos_token_id": None}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, num_attention_heads=4))


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)


def nanogpt() -> nn.Module:
    return GPT(GPTConfig(vocab=32, width=32, layers=2, context=16))


class Flat(nn.Module):
    """Attention and MLP written into the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)


def flat() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 32), nn.Sequential(Flat(), Flat()), nn.Linear(32, 9))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 5))


def experts() -> nn.Module:
    """A list of blocks in each block."""
    expert = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
    block = nn.ModuleDict(
        {"router": nn.Linear(32, 2), "experts": nn.ModuleList([expert, copy.deepcopy(expert)])}
    )
    return nn.ModuleDict({"blocks": nn.ModuleList([block]), "head": nn.Linear(32, 9)})


def wrapped() -> nn.Module:
    return nn.Sequential(nanogpt())


# Model -> what is outside of the blocks, what joins the residual stream.
PATTERNS = {
    gpt2: (["lm_head"], ["*.c_proj"]),
    llama: (["lm_head"], ["*.o_proj", "*.down_proj"]),
    bert: (["cls.*"], ["*.output.dense"]),
    t5: (["lm_head"], ["*Attention.o", "*.wo"]),
    encoder: ([], ["*.self_attn", "*.linear2"]),
    nanogpt: (["head"], ["*.out", "*.down"]),
    wrapped: (["0.head"], ["*.out", "*.down"]),
    flat: (["2"], ["*.o", "*.down"]),
    mlp: (["3"], []),
    experts: (["head"], ["*.down"]),
}


def any_of(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("make", PATTERNS, ids=lambda make: make.__name__)
def test_the_choice(make, where):
    outside, joining = PATTERNS[make]
    if where == "umup":
        outside = outside + joining
    model = fp8.convert(make(), "unit", where=where, rest="bf16")
    rows = [row for row in fp8.report(model) if not row.left_alone]
    assert rows
    for row in rows:
        assert row.why.startswith("bf16" if any_of(row.path, outside) else "unit"), row


def test_without_a_recipe_for_the_rest_they_are_left_alone():
    model = fp8.convert(nanogpt(), "unit", where="umup")
    left = {row.path: row.why for row in fp8.report(model).left_alone}
    assert left["head"] == "umup: outside of the blocks that the model repeats"
    assert "joins the residual stream" in left["blocks.1.mlp.down"]
    assert "blocks.1.mlp.up" not in left
    other = copy.deepcopy(model)
    assert fp8.report(other).rows == fp8.report(model).rows
    fp8.convert(model, "unit", where="hidden")
    assert [r.path for r in fp8.report(model).left_alone] == ["tokens", "positions", "head"]
    assert {r.why for r in fp8.report(fp8.revert(other))} == {
        "not chosen",
        "a lookup, not a product",
    }
    assert not any("fp8" in key for module in other.modules() for key in vars(module))


def test_each_layer_computes_under_its_recipe():
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(6, 32)
    with fp8.autocast("unit"):
        hidden = model[:3](x)
    with fp8.autocast("bf16"):
        want = model[3](hidden)
    assert torch.equal(fp8.convert(model, "unit", where="hidden", rest="bf16")(x), want)


@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_a_layer_of_gpt2_is_a_linear_layer(recipe):
    """Its weight is stored as (in, out), and cast as the weight (out, in) that it is."""
    torch.manual_seed(0)
    layer = gpt2().transformer.h[0].mlp.c_fc
    plain = nn.Linear(32, 128)
    plain.weight, plain.bias = nn.Parameter(layer.weight.detach().T), layer.bias
    x = torch.randn(2, 5, 32, requires_grad=True)
    results = []
    for module in (fp8.convert(layer, recipe), fp8.convert(plain, recipe)):
        y = module(x)
        grads = torch.autograd.grad(y.square().sum(), [x, module.weight, module.bias])
        results.append([y, grads[0], grads[1].T if module is plain else grads[1], grads[2]])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert "Conv1D" in repr(fp8.revert(layer))


@pytest.mark.native
def test_the_rest_is_simulated_where_its_recipe_has_no_kernels():
    model = fp8.convert(
        mlp(), "unit", backend="native", where=lambda name, _: name == "0", rest="bf16"
    )
    rows = {row.path: row.why for row in fp8.report(model)}
    assert rows["0"] == "unit, native"
    assert rows["2"] == "bf16 (not chosen), simulated: the kernels have no format 'bf16'"
    assert model(torch.randn(16, 32)).shape == (16, 5)


def test_refusals():
    model = fp8.convert(mlp(), "unit")
    with pytest.raises(ValueError, match="unknown where 'all'; choose one of 'hidden', 'umup'"):
        fp8.convert(model, "unit", where="all")
    assert not fp8.report(model).left_alone  # as it was
    with pytest.raises(TypeError, match="where is a int; give a name or"):
        fp8.convert(mlp(), "unit", where=3)
    with pytest.raises(ValueError, match="unknown recipe 'int3'"):
        fp8.convert(mlp(), "unit", where="hidden", rest="int3")
    with pytest.raises(ValueError, match="rest='bf16' needs a backend of this library"):
        fp8.convert(mlp(), "unit", where="hidden", rest="bf16", backend="torchao")


# --- Functions


def by_hints(a: nn.Module, b: str) -> bool:
    return b == "0"


def ours_by_hints(a: str, b: nn.Module) -> bool:
    return a == "0"


def torchao_filter(mod, fqn):
    return isinstance(mod, nn.Linear) and fqn == "0"


class Filter:
    def __call__(self, module, name):
        return name == "0"


ORDERS = {
    "ours": lambda name, layer: name == "0",
    "turned": lambda layer, name: name == "0",
    "torchao": torchao_filter,
    "annotated": by_hints,
    "ours annotated": ours_by_hints,
    "object": Filter(),
    "by trying": lambda a, b: b.startswith("0"),
    "ours by trying": lambda a, b: a.startswith("0"),
    "by choosing": lambda a, b: isinstance(a, nn.Linear) and b == "0",
    "any number": lambda *given: given[0] == "0",
}


@pytest.mark.parametrize("name", ORDERS)
def test_both_orders_of_arguments_are_understood(name):
    model = fp8.convert(mlp(), "tensor", where=ORDERS[name])
    assert [row.path for row in fp8.report(model) if row.done == "converted"] == ["0"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (lambda name: True, r"where is called as where\(name, layer\)"),
        (lambda name, layer, more: True, r"where is called as where\(name, layer\)"),
        (lambda name, layer: 1, "where must return a bool, got 1 for layer '0'"),
        (lambda name, layer: None, "where must return a bool, got None"),
    ],
)
def test_other_functions_are_refused(where, message):
    with pytest.raises(TypeError, match=message):
        fp8.convert(mlp(), "tensor", where=where)


@pytest.mark.parametrize("rest", [None, "bf16"])
def test_where_that_chooses_nothing_warns(rest):
    model = mlp()
    with pytest.warns(fp8.ConvertWarning, match=r"no layer of the Sequential .*not chosen") as seen:
        fp8.convert(model, "tensor", where=lambda name, layer: name == "up", rest=rest)
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_a_conversion_that_changes_nothing_warns():
    with pytest.warns(fp8.ConvertWarning, match="none has a weight"):
        fp8.convert(nn.Sequential(nn.GELU()))
    with pytest.warns(fp8.ConvertWarning, match=r"a lookup, not a product \(1\)"):
        fp8.initialize(nn.Sequential(nn.Embedding(4, 4)), None, "O1")
    with fp8.strict(), pytest.raises(fp8.ConvertWarning):
        fp8.convert(nn.Sequential(nn.GELU()))
