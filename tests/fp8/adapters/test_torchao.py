"""torchao's layers in a model and out of it, run for real: emulated, and by its CPU products."""

import pytest
import torch
from torch import nn

import fp8
from fp8 import RECIPES, Cast, Recipe
from fp8.adapters import torchao
from fp8.kernels.kernel import why_not_device
from tests.shared import by_path, linears, parametrize, quietly, refuses, theirs

with quietly():
    pytest.importorskip("torchao", reason="the library that is adapted")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear
    from torchao.quantization import Int8WeightOnlyConfig, quantize_


pytestmark = theirs

EXACT = {
    field: Cast(format=format, scaling="tensor", rule="exact")
    for field, format in (("input", "e4m3"), ("weight", "e4m3"), ("grad", "e5m2"))
}
THEIRS = {
    "tensorwise": Recipe(name="tensorwise", **EXACT),
    "rowwise": RECIPES["row"],
    "rowwise_with_gw_hp": RECIPES["row_gw_hp"],
}


def mlp():
    return linears(64, 128, nn.GELU, 32)


@parametrize("name", THEIRS)
def test_configurations_are_those_of_its_recipes(name):
    want = Float8LinearConfig.from_recipe_name(name)
    got = torchao.ao_config(THEIRS[name])
    for field in vars(want).keys() - {"pad_inner_dim"}:
        assert getattr(got, field) == getattr(want, field), field
    assert got.pad_inner_dim


NO_KERNEL = why_not_device(torch.device("cpu"))


@pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL)
def test_a_report_and_the_way_back():
    """convert_to_float8_training tears layers with two names in two and drops hooks, the train flag
    and attributes."""
    attention = nn.MultiheadAttention(16, 2)
    model = mlp().append(nn.LayerNorm(32)).append(nn.Linear(32, 10)).append(attention)
    model.add_module("again", model[0])
    model[0].comment = "mine"
    model[0].eval()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    held = lambda: [(name, id(p)) for name, p in model.named_parameters()]  # noqa: E731
    before = held()
    fp8.convert(
        model, "tensor", backend="torchao", where=lambda name, layer: name != "2"
    )
    rows = by_path(fp8.report(model), "done", "why")
    assert rows == {
        "0": ("converted", "torchao, Float8Linear"),
        "2": ("left alone", "not chosen"),
        "4": ("left alone", "10 is no multiple of 16"),
        "5": ("left alone", "torchao replaces linear layers"),
        "5.out_proj": ("left alone", "computed by 5"),
    }
    assert type(model[0]) is Float8Linear
    assert model[0] is model.again
    assert (model[0].comment, model[0].training) == ("mine", False)
    model[0](torch.randn(16, 64))
    assert calls == [1]
    assert held() == before
    fp8.revert(model)
    assert type(model[0]) is nn.Linear
    assert held() == before
    assert {name for name in vars(model[0]) if name.startswith("fp8")} == set()
    layer = nn.Linear(32, 16)
    converted = fp8.convert(layer, "row", backend="torchao")
    assert type(converted) is Float8Linear
    assert type(fp8.revert(converted)) is nn.Linear
    odd = torchao.convert(linears(10, 6), "tensor", emulate=True)
    rows = by_path(fp8.report(odd), "done", "why")
    assert rows == {"0": ("converted", "torchao, Float8Linear, emulated")}
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    with refuses("enable_fsdp_float8_all_gather must be False"):
        # Optimizers would hold weights that are not the model's.
        torchao.convert(mlp(), config)


@parametrize("recipe", ["tensor", "row"])
def test_any_number_of_tokens(recipe):
    model = torchao.convert(mlp(), recipe)
    for shape in ((5, 64), (3, 7, 64), (1, 64)):
        y = model(torch.randn(shape))
        assert y.shape == (*shape[:-1], 32)
        y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_what_it_does_not_have():
    known = {"tensor", "tensor_gw_hp", "row", "row_gw_hp"}
    for name in RECIPES.keys() - known:
        with refuses(rf"torchao has no .* for recipe '{name}'; it has"):
            torchao.ao_config(name)
    stochastic = Cast(format="e4m3", scaling="tensor", rounding="stochastic")
    own = Recipe(name="own", input=stochastic, weight=stochastic, grad=stochastic)
    with refuses("no configuration for recipe 'own'"):
        torchao.ao_config(own)


@parametrize("backend", ["simulate", "torchao"])
@parametrize("change", ["quantize_", "convert_to_float8_training"])
def test_layers_that_torchao_changed_are_left_alone(change, backend):
    """Their operands are no tensors that a cast takes: the first call failed."""
    model, x = mlp(), torch.randn(16, 64)
    only = lambda module, name: name == "0"  # noqa: E731
    if change == "quantize_":
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=only)
        why = "quantized: its weight is a Int8Tensor of torchao"
    else:
        convert_to_float8_training(model, module_filter_fn=only)
        own = "a layer of torchao, which computes its products"
        why = own if backend == "simulate" else "a subclass: its forward may be its own"
    expected = model[0](x)
    rows = fp8.report(fp8.convert(model, "tensor", backend=backend))
    assert [row.done for row in rows] == ["left alone", "converted"]
    assert rows[0].why == why
    assert torch.equal(model[0](x), expected)
    model(x).sum().backward()
