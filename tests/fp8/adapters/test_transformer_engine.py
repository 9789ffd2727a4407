"""TransformerEngine's layers in a model and out of it, with a stand-in made from its signatures.

What `swap` does for every library is tested with torchao's layers, which run here.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8.adapters import transformer_engine
from tests.fp8.adapters import te_standin


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    return te_standin.install(monkeypatch)


class Model(nn.Module):
    """An odd layer before others, ties, two names, a frozen layer, norms of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.odd = nn.Linear(32, 10)
        self.back = nn.Linear(10, 32)
        self.a = nn.Linear(32, 32)
        self.b = self.a
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.norm = nn.LayerNorm(32, eps=1e-3)
        self.rms = nn.RMSNorm(32)
        self.plain = nn.LayerNorm(32, elementwise_affine=False)
        self.unbiased = nn.LayerNorm(32, bias=False)
        self.wide = nn.LayerNorm((4, 32))
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits. tokens: (n, 4)."""
        x = self.wide(self.norm(self.embed(tokens)))
        x = self.b(self.a(x + self.back(self.odd(x))))
        x = self.unbiased(self.plain(self.rms(self.frozen(x))))
        return self.head(x)


TOKENS = torch.arange(48).view(12, 4)


def convert(model: nn.Module, recipe: str = "tensor") -> nn.Module:
    return fp8.convert(model, recipe, backend="transformer_engine")


def report_of_nothing(model: nn.Module) -> Any:
    """The report of a conversion that converts nothing, which it says."""
    with pytest.warns(fp8.warnings.ConvertWarning, match="was chosen and converted"):
        return fp8.report(convert(model))


def ran(model: nn.Module, *args: Tensor) -> set[str | None]:
    """The recipes in force in the products of a call."""
    te_standin.STATE["ran"].clear()
    model(*args)
    recipes = te_standin.STATE["ran"]
    return {None if recipe is None else type(recipe).__name__ for recipe in recipes}


@pytest.mark.proves("TransformerEngine", "nn.Linear to te.Linear", how="signatures")
@pytest.mark.proves("TransformerEngine", "nn.LayerNorm to te.LayerNorm", how="signatures")
def test_each_layer_is_converted_or_said_to_be_left_alone(te):
    model = convert(Model())
    rows = {row.path: (row.done, row.why) for row in fp8.report(model)}
    done = ("converted", "TransformerEngine, Float8CurrentScaling")
    assert rows == {
        "embed": ("left alone", "TransformerEngine has no such layer"),
        "odd": ("left alone", "10 is no multiple of 16"),
        "back": ("left alone", "10 is no multiple of 16"),
        **dict.fromkeys(("a", "frozen", "norm", "rms", "wide", "head"), done),
        "plain": ("left alone", "te.LayerNorm has no form without weight"),
        "unbiased": ("left alone", "te.LayerNorm has no form without bias"),
    }
    assert isinstance(model.a, te.Linear)
    assert isinstance(model.norm, te.LayerNorm)
    assert isinstance(model.rms, te.RMSNorm)


@pytest.mark.parametrize(("recipe", "size"), [("mxfp8", 32), ("block", 128), ("tensor", 16)])
def test_sizes_are_those_that_the_recipe_takes(recipe, size):
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, 3 * size // 2))
    rows = fp8.report(convert(model, recipe))
    assert [row.left_alone for row in rows] == [False, True]


def test_there_and_back_the_model_stays_itself():
    """The same parameters without copies or random numbers, ties, attributes, and no
    `_extra_state` in checkpoints; a copy has them too. Nothing is left after the way back."""
    model = Model()
    model.a.comment = "mine"
    model.norm.eval()
    plain = model(TOKENS)
    modules = {name: (type(m), set(vars(m)), m.training) for name, m in model.named_modules()}
    parameters = [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    keys, state = list(model.state_dict()), torch.get_rng_state()
    assert convert(model, "unit") is model
    for module in (model, copy.deepcopy(model)):
        assert torch.allclose(module(TOKENS), plain, rtol=1e-5, atol=1e-5)
        assert list(module.state_dict()) == keys
        assert module.a is module.b
        assert module.head.weight is module.embed.weight
        assert (module.a.comment, module.norm.training) == ("mine", False)
        assert not module.frozen.weight.requires_grad
    assert [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)] == parameters
    assert torch.equal(torch.get_rng_state(), state)
    assert fp8.revert(model) is model
    found = {name: (type(m), set(vars(m)), m.training) for name, m in model.named_modules()}
    assert found == modules
    assert [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)] == parameters
    assert (model.rms.eps, model.norm.eps, model.head.bias) == (None, 1e-3, None)
    assert torch.equal(model(TOKENS), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    model = convert(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).to(dtype))
    assert {p.dtype for p in model.parameters()} == {dtype}
    model(torch.randn(16, 32, dtype=dtype)).sum().backward()
    (row,) = report_of_nothing(nn.Sequential(nn.Linear(32, 32).double()))
    assert row.why == "TransformerEngine has no torch.float64"


@pytest.mark.proves("TransformerEngine", "FP8 products, everything else as it is", how="signatures")
def test_under_its_recipe_in_training_and_in_evaluation_if_asked():
    layer, x = nn.Linear(32, 32), torch.randn(16, 32)
    assert ran(convert(layer, "mxfp8"), x) == {"MXFP8BlockScaling"}  # a model that is a layer
    model = convert(Model())
    assert ran(model, TOKENS) == {"Float8CurrentScaling"}
    assert ran(model.eval(), TOKENS) == {None}
    recipe = transformer_engine.delayed_scaling(amax_history_len=4)
    model = transformer_engine.convert(nn.Sequential(layer), recipe, in_eval=True)
    assert ran(model.eval(), x) == {"DelayedScaling"}
    assert te_standin.STATE["entered"][-1]["recipe"] is recipe
    assert ran(fp8.revert(model), x) == set()


def test_its_context():
    with transformer_engine.autocast("delayed"):
        assert te_standin.STATE["recipe"] == transformer_engine.te_recipe("delayed")
        with transformer_engine.autocast("tensor", enabled=False):
            assert te_standin.STATE["recipe"] is None


def test_back_from_layers_that_others_put_there(te):
    """As accelerate's: bias=False is an empty tensor, the state_dict has `_extra_state`."""
    model = nn.Sequential(
        te.Linear(32, 16, bias=False, device="cpu"),
        te.LayerNorm(16, device="cpu"),
        te.RMSNorm(16, zero_centered_gamma=True, device="cpu"),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(16, 32)
    want = model[1](model[0](x))
    state = model.state_dict()
    assert [key for key in state if key.endswith("_extra_state")]
    back = transformer_engine.revert(model)
    assert [type(layer) for layer in back] == [nn.Linear, nn.LayerNorm, te.RMSNorm]
    assert back[0].bias is None
    assert torch.equal(back[1](back[0](x)), want)
    fresh = nn.Sequential(nn.Linear(32, 16, bias=False), nn.LayerNorm(16), nn.RMSNorm(16))
    fresh.load_state_dict(transformer_engine.weights(state))
    assert torch.equal(fresh[1](fresh[0](x)), want)


def test_weights_go_both_ways_with_strict_keys():
    plain, converted = Model(), convert(Model())
    converted.load_state_dict(plain.state_dict())
    assert torch.equal(converted.head.weight, plain.head.weight)
    torch.save(converted.state_dict(), file := io.BytesIO())
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))


def test_layers_that_compute_otherwise_are_left_alone():
    """Subclasses, computed weights, and layers with factors that TransformerEngine's lack."""
    import unit_scaling as uu
    from unit_scaling.transforms import unit_scale

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with pytest.warns(FutureWarning, match="weight_norm"):
        computed = nn.utils.weight_norm(nn.Linear(32, 32))
    subclass = "a subclass: its forward may be its own"
    for layer, why in (
        (Doubled(32, 32), subclass),
        (nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), subclass),
        (uu.Linear(32, 32), subclass),
        (computed, "its weight is computed, not a parameter"),
        (unit_scale(nn.Sequential(nn.Linear(32, 32))), "transformed: its scales would be lost"),
    ):
        assert report_of_nothing(nn.Sequential(layer))[0].why == why


def test_layers_with_two_names_take_no_delayed_scaling():
    """DelayedScaling: "any module must not be invoked more than once" in its context."""
    rows = {row.path: row.why for row in fp8.report(convert(Model(), "delayed"))}
    assert rows["a"] == "has two names, and DelayedScaling takes one call a pass"
    assert rows["frozen"] == "TransformerEngine, DelayedScaling"
    assert fp8.report(convert(Model(), "unit"))[3].done == "converted"


def test_where_and_another_recipe_after_it():
    model = convert(Model())
    fp8.convert(model, "unit", backend="transformer_engine", where=lambda name, layer: name == "a")
    rows = {row.path: row for row in fp8.report(model)}
    assert rows["a"].why == "TransformerEngine, DelayedScaling"
    assert rows["frozen"].why == "not chosen"
    assert type(model.frozen) is nn.Linear
    fp8.convert(model, "tensor", backend="simulate")
    assert type(model.rms) is nn.RMSNorm
    assert fp8.report(model)[0].path == "embed"
    with pytest.raises(ValueError, match="no recipe for 'row'"):
        convert(model, "row")
    assert fp8.report(model)[1].done == "converted"


def test_any_number_of_tokens():
    """TransformerEngine raises for a ragged last batch (its issue 1571). Rows of zeros are added
    and taken away."""
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16, bias=False))
    for shape in ((5, 32), (2, 3, 32), (1, 32), (0, 32), (16, 32)):
        model, x = convert(copy.deepcopy(layers)), torch.randn(shape)
        results = [(y := m(x)).detach() for m in (model, layers)]
        assert torch.allclose(*results, rtol=1e-5, atol=1e-6)
        gradients = [torch.autograd.grad(m(x).square().sum(), m[0].weight) for m in (model, layers)]
        assert torch.allclose(gradients[0][0], gradients[1][0], rtol=1e-4, atol=1e-5)
        assert y.shape == (*shape[:-1], 16)


def test_the_fast_path_of_the_encoder_does_not_skip_its_layers():
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    model = convert(nn.TransformerEncoder(layer, 2).eval())
    with torch.no_grad():
        assert ran(model, torch.randn(2, 8, 32)) == {None}
    assert len(te_standin.STATE["ran"]) == 4
