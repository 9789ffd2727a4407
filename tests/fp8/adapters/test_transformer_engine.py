"""TransformerEngine's layers in a model and out of it, with a stand-in made from its signatures.

What converters before this one do to a model (accelerate's convert_model, Lightning's
_convert_layers) is named where the test is about it.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8 import Cast, Recipe
from fp8.adapters import transformer_engine
from tests.fp8.adapters import te_standin

ROOT = Path(__file__).parents[3]

EXACT = {
    field: Cast(format=format, scaling="tensor", rule="exact")
    for field, format in (("input", "e4m3"), ("weight", "e4m3"), ("grad", "e5m2"))
}


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
    with pytest.warns(fp8.ConvertWarning, match="was chosen and converted"):
        return fp8.report(convert(model))


def loss(model: nn.Module) -> Tensor:
    return model(TOKENS).square().mean()


@pytest.mark.proves("TransformerEngine", "nn.Linear to te.Linear", how="signatures")
@pytest.mark.proves("TransformerEngine", "nn.LayerNorm to te.LayerNorm", how="signatures")
def test_each_layer_is_converted_or_said_to_be_left_alone(te):
    """An odd layer ends neither the walk (accelerate) nor a layer of 24 -> 32 passes (Lightning,
    which checks in % 8 and out % 16); norms without weight raise nothing."""
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
    assert report_of_nothing(nn.Sequential(nn.Linear(24, 32))).left_alone
    assert report_of_nothing(nn.Sequential(nn.Linear(32, 24))).left_alone


@pytest.mark.parametrize(("recipe", "size"), [("mxfp8", 32), ("block", 128), ("tensor", 16)])
def test_sizes_are_those_that_the_recipe_takes(recipe, size):
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, 3 * size // 2))
    rows = fp8.report(convert(model, recipe))
    assert [row.left_alone for row in rows] == [False, True]


def test_the_model_stays_itself(te):
    """accelerate: ties broken, requires_grad and eval() and hooks and device lost, a layer with two
    names torn in two, the new head in no optimizer."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss(model).backward()
    optimizer.step()
    before = list(model.named_parameters(remove_duplicate=False))
    keys = list(model.state_dict())
    calls: list[str] = []
    handle = model.a.register_forward_hook(lambda *_: calls.append("a"))
    model.a.comment = "mine"
    model.norm.eval()
    convert(model)
    after = list(model.named_parameters(remove_duplicate=False))
    assert [(n, id(p)) for n, p in after] == [(n, id(p)) for n, p in before]
    assert list(model.state_dict()) == keys
    assert model.a is model.b
    assert model.head.weight is model.embed.weight
    assert not model.frozen.weight.requires_grad
    assert not model.norm.training
    assert model.a.comment == "mine"
    assert model.norm.normalized_shape == (32,)
    loss(model).backward()
    assert calls == ["a", "a"]
    handle.remove()
    model(TOKENS)
    assert calls == ["a", "a"]
    weight = model.head.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.head.weight, weight)


def test_no_memory_and_no_random_numbers_are_used():
    """accelerate holds old and new weights together (its issue 3652)."""
    model = Model()
    addresses = [p.data_ptr() for p in model.parameters()]
    state = torch.get_rng_state()
    convert(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    model = convert(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).to(dtype))
    assert {p.dtype for p in model.parameters()} == {dtype}
    model(torch.randn(16, 32, dtype=dtype)).sum().backward()
    (row,) = report_of_nothing(nn.Sequential(nn.Linear(32, 32).double()))
    assert row.why == "TransformerEngine has no torch.float64"


@pytest.mark.proves("TransformerEngine", "FP8 products, everything else as it is", how="signatures")
@pytest.mark.parametrize("recipe", ["tensor", "unit"])
def test_it_computes_what_our_own_products_do(recipe):
    ours, theirs = Model(), Model()
    theirs.load_state_dict(ours.state_dict())
    wanted = {"a", "frozen", "head"}
    convert(theirs, recipe)
    fp8.convert(ours, recipe, backend="simulate", where=lambda name, layer: name in wanted)
    for model in (ours, theirs):
        loss(model).backward()
    assert torch.equal(ours(TOKENS), theirs(TOKENS))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_off_in_eval_unless_asked():
    """Lightning's is on in eval too."""
    model = convert(Model())
    plain = fp8.revert(copy.deepcopy(model)).eval()(TOKENS)
    assert not torch.equal(model(TOKENS), plain)
    assert torch.equal(model.eval()(TOKENS), plain)
    model = transformer_engine.convert(fp8.revert(model), "tensor", in_eval=True)
    assert not torch.equal(model(TOKENS), plain)


def test_back_and_nothing_is_left():
    """accelerate's way back raises a TypeError, always."""
    model = Model()
    model.a.comment = "mine"
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    types = {name: type(module) for name, module in model.named_modules()}
    plain = model(TOKENS)
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    assert fp8.revert(convert(model)) is model
    assert {name: type(module) for name, module in model.named_modules()} == types
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)] == before
    assert (model.a.comment, model.rms.eps, model.norm.eps) == ("mine", None, 1e-3)
    assert model.head.bias is None
    assert torch.equal(model(TOKENS), plain)
    assert "not chosen" in {row.why for row in fp8.report(model)}


def test_back_from_layers_that_others_put_there(te):
    """What accelerate makes: bias=False is an empty tensor, the state_dict has `_extra_state`."""
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
    """te.Linear's `_extra_state` is missing one way and unexpected the other, and TransformerEngine
    2.20 refuses to load it."""
    plain, converted = Model(), convert(Model())
    converted.load_state_dict(plain.state_dict())
    assert torch.equal(converted.eval()(TOKENS), plain(TOKENS))
    plain.load_state_dict(converted.state_dict())
    converted.load_state_dict(converted.state_dict())
    torch.save(converted.state_dict(), file := io.BytesIO())
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))


def test_a_model_that_is_a_layer(te):
    """accelerate and Lightning walk over children only."""
    layer = nn.Linear(32, 16)
    converted = convert(layer)
    assert isinstance(converted, te.Linear)
    assert converted.weight is layer.weight
    x = torch.randn(16, 32)
    assert not torch.equal(converted(x), layer(x))
    back = fp8.revert(converted)
    assert type(back) is nn.Linear
    assert torch.equal(back(x), layer(x))


def test_subclasses_and_attention_are_left_alone():
    """The others replace out_proj, whose weight nn.MultiheadAttention reads without calling it."""

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    parts = {
        "own": Doubled(32, 32),
        "attn": nn.MultiheadAttention(32, 2),
        "normed": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
    }
    model = nn.ModuleDict(parts)
    rows = {row.path: row.why for row in report_of_nothing(model)}
    assert rows["own"] == "a subclass: its forward may be its own"
    assert rows["attn.out_proj"] == "computed by attn"
    assert rows["normed"] == "a subclass: its forward may be its own"
    assert type(model["own"]) is Doubled


def test_a_unit_scaled_model_is_left_alone():
    """Its layers multiply by factors that TransformerEngine's do not have."""
    import unit_scaling as uu
    from unit_scaling.transforms import unit_scale

    parts = [nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)]
    scaled = unit_scale(nn.Sequential(*parts))
    whys = {row.why for row in report_of_nothing(scaled)}
    assert whys == {"transformed: its scales would be lost"}
    (row,) = report_of_nothing(nn.Sequential(uu.Linear(32, 32)))
    assert row.why == "a subclass: its forward may be its own"


def test_a_computed_weight_is_left_alone():
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = nn.utils.weight_norm(nn.Linear(32, 32))
    (row,) = report_of_nothing(nn.Sequential(layer))
    assert row.why == "its weight is computed, not a parameter"


def test_layers_with_two_names_take_no_delayed_scaling():
    """DelayedScaling: "any module must not be invoked more than once" in its context."""
    rows = {row.path: row.why for row in fp8.report(convert(Model(), "delayed"))}
    assert rows["a"] == "has two names, and DelayedScaling takes one call a pass"
    assert rows["frozen"] == "TransformerEngine, DelayedScaling"
    assert fp8.report(convert(Model(), "unit"))[3].done == "converted"


def test_where_and_another_recipe_after_it(te):
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
    """TransformerEngine raises for a ragged last batch (its issue 1571). Rows of zeros change
    nothing: the same as our own products, which take any number."""
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16, bias=False))
    exact = Recipe(name="exact", **EXACT)
    for shape in ((5, 32), (2, 3, 32), (1, 32), (0, 32), (16, 32)):
        x = torch.randn(shape)
        model = convert(copy.deepcopy(layers), exact)
        got = model(x)
        got.square().sum().backward()
        want = fp8.convert(copy.deepcopy(layers), exact, backend="simulate")
        expected = want(x)
        expected.square().sum().backward()
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)
        for one, other in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_contexts_of_both_names(te, monkeypatch):
    recipe = transformer_engine.te_recipe("delayed")
    with transformer_engine.autocast("delayed"):
        assert te_standin.STATE["entered"][-1]["recipe"] == recipe
    monkeypatch.delattr(te, "autocast")
    with transformer_engine.autocast(recipe, enabled=False):
        assert te_standin.STATE["recipe"] is None
    assert te_standin.STATE["entered"][-1]["enabled"] is False


def test_its_own_recipe_objects_are_taken():
    recipe = transformer_engine.delayed_scaling(amax_history_len=4)
    model = transformer_engine.convert(Model(), recipe)
    model(TOKENS)
    assert te_standin.STATE["entered"][-1]["recipe"] is recipe


def test_copies_are_converted(te):
    model = convert(Model(), "unit")
    want = model(TOKENS)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS), want)
    assert twin.a is twin.b
    assert twin.head.weight is twin.embed.weight
    assert twin.a.weight is not model.a.weight
    for part in (te_standin.Linear, te_standin.LayerNorm, te_standin.RMSNorm):
        assert getattr(te, part.__name__) is part
    twin = pickle.loads(pickle.dumps(fp8.revert(model)))
    assert torch.equal(twin(TOKENS), model(TOKENS))


def test_the_fast_path_of_the_encoder_does_not_skip_its_layers():
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 8, 32)
    convert(model, "tensor")
    calls: list[Tensor] = []
    model.layers[0].linear1.register_forward_hook(lambda m, a, y: calls.append(y))
    with torch.no_grad():
        got = model(x)
    assert len(calls) == 1
    fp8.revert(model)
    with torch.no_grad():
        assert torch.allclose(got, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.proves("TransformerEngine", "nn.Linear to te.Linear", how="library")
@pytest.mark.proves("TransformerEngine", "nn.LayerNorm to te.LayerNorm", how="library")
def test_with_the_packages_own_python(wheel):
    """Its real classes, contexts and update of scales, with mocks for what is compiled."""
    pytest.importorskip("pydantic", reason="the package's recipes are pydantic dataclasses")
    script = "tests.fp8.adapters.te_published"
    run = [sys.executable, "-W", "ignore", "-m", script, str(wheel)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "ok\n", done.stderr


def test_without_the_library(monkeypatch):
    monkeypatch.undo()
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:
        model = Model()
        with pytest.raises(ImportError, match=r"transformer_engine is .*unit-scaling-fp8\[te\]"):
            convert(model)
        assert type(model.a) is nn.Linear
    else:
        pytest.skip("TransformerEngine is installed")
