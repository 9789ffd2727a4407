"""Layers and classes that are not as most are: converted and reverted, or left alone by name."""

import copy
import dataclasses
import pickle
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fp8

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


FORMS = {nn.Conv1d: {"kernel_size": 1}}


def layer(cls: type = nn.Linear, **options):
    torch.manual_seed(0)
    return cls(32, 32, **options)


class Tagged(nn.Linear):
    """Counts its subclasses, each of which needs a tag."""

    seen: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, tag: str) -> None:
        cls.seen.append(tag)


class Mine(Tagged, tag="mine"):
    pass


@pytest.mark.parametrize("undo", ["revert", "convert"])
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_after_it_was_converted(wrap, undo):
    """Torch derives a class from ours, with a property for the weight, which has to stay."""
    model = nn.Sequential(fp8.convert(layer(), "unit"))
    wrap(model[0])
    model.eval()  # spectral_norm changes in training
    weight = model[0].weight
    with fp8.autocast("unit"):
        expected = nn.functional.linear(X, weight, model[0].bias)
    assert torch.equal(model(X), expected)
    if undo == "convert":
        fp8.convert(model, "tensor")
        assert fp8.report(model)[0].done == "converted"
    fp8.revert(model)
    assert torch.equal(model(X), nn.functional.linear(X, model[0].weight, model[0].bias))
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear


class LowRank(nn.Module):
    """A weight with an update of low rank, as adapters make it."""

    def __init__(self, rows, columns):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(s)) for s in ((rows, 2), (2, columns)))

    def forward(self, weight):
        return weight + (self.up @ self.down).view_as(weight)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("recipe", ["tensor", "static"])
@pytest.mark.parametrize(
    ("make", "x", "name", "sizes"),
    [
        (layer, X, "weight", None),
        (lambda: nn.Conv1d(4, 6, 3), torch.randn(2, 4, 8), "weight", (6, 12)),
        (lambda: nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8), "in_proj_weight", (24, 8)),
    ],
)
def test_products_that_compute_a_weight_are_not_the_layer_s(make, x, name, sizes, recipe, after):
    """They are not cast, and do not enter the scales of the layer."""

    def run(module):
        torch.manual_seed(0)
        args = (x,) * 3 if isinstance(module, nn.MultiheadAttention) else (x,)
        return [out for _ in range(3) for out in [module(*args)] if out is not None]

    def first(outs):
        return [out[0] if isinstance(out, tuple) else out for out in outs]

    module = make()
    torch.manual_seed(1)
    low = LowRank(*(sizes or module.weight.shape))
    merged = copy.deepcopy(module)
    getattr(merged, name).data = low(getattr(module, name)).detach()
    fp8.convert(merged, recipe, backend="simulate")
    if after:
        fp8.convert(module, recipe, backend="simulate")
    parametrize.register_parametrization(module, name, low)
    if not after:
        fp8.convert(module, recipe, backend="simulate")
    for found, expected in zip(first(run(module)), first(run(merged)), strict=True):
        assert torch.equal(found, expected)
    buffers = dict(module.named_buffers())
    assert all(torch.equal(buffers[key], value) for key, value in merged.named_buffers())
    kept = type(fp8.revert(module).parametrizations[name])
    assert kept is parametrize.ParametrizationList


def test_a_class_that_another_derived_from_ours_stays_on_top():
    """As FSDP2 does with the modules that it shards."""

    class Mixin:
        def hello(self):
            return type(self).__name__

    converted = fp8.convert(layer())
    converted.__class__ = type("Mixed", (Mixin, type(converted)), {})
    fp8.convert(converted, "tensor")
    assert (converted.hello(), fp8.report(converted)[0].done) == ("Mixed", "converted")
    fp8.revert(converted)
    assert (converted.hello(), type(converted).__bases__) == ("Mixed", (Mixin, nn.Linear))


def test_a_class_that_its_subclasses_are_told_to():
    before = list(Tagged.seen)
    model = fp8.convert(layer(Mine), "unit")
    with fp8.autocast("unit"):
        expected = nn.functional.linear(X, model.weight, model.bias)
    assert torch.equal(model(X), expected)
    assert Tagged.seen == before
    assert type(fp8.revert(model)) is Mine


@pytest.mark.parametrize("cls", [nn.Linear, nn.Conv1d, nn.LayerNorm])
def test_a_forward_that_was_replaced_after_is_the_plain_one_once_reverted(cls):
    """As trainers and offloading do it: what they call is the forward that was there before."""
    plain = cls(32) if cls is nn.LayerNorm else layer(cls, **FORMS.get(cls, {}))
    x = X[..., None] if cls is nn.Conv1d else X
    expected = plain(x)
    if cls is nn.LayerNorm:
        fp8.apply_low_precision_layernorm(plain, "amp_bf16")
    else:
        fp8.convert(plain)
    plain.forward = lambda x, forward=plain.forward: forward(x)
    assert not torch.equal(plain(x), expected)
    fp8.revert(plain)
    assert torch.equal(plain(x), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_weights_that_no_recipe_casts_are_left_alone():
    sparse = layer(bias=False)
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse_csr())
    model = nn.ModuleList([layer(dtype=torch.complex64), sparse])
    expected = [model[0](X.to(torch.complex64)), model[1](X)]
    with pytest.warns(fp8.warnings.ConvertWarning, match="torch.complex64"):
        fp8.convert(model)
    why = [row.why for row in fp8.report(model).left_alone]
    assert why == [
        "no recipe casts its weight: torch.complex64, torch.strided",
        "no recipe casts its weight: torch.float32, torch.sparse_csr",
    ]
    assert torch.equal(model[0](X.to(torch.complex64)), expected[0])
    assert torch.equal(model[1](X), expected[1])


@pytest.mark.parametrize("wrong", [((), {}), ((X, X), {}), ((), {"x": X}), (([1.0],), {})], ids=str)
def test_a_wrong_call_is_the_error_of_torch(wrong):
    args, kwargs = wrong
    plain = layer()
    with pytest.raises(TypeError) as expected:
        plain(*args, **kwargs)
    with pytest.raises(TypeError) as got:
        fp8.convert(plain)(*args, **kwargs)
    assert str(got.value) == str(expected.value)


def test_histories_of_a_module_with_two_names(tmp_path):
    """safetensors writes it under one of its names; the other one resets nothing."""
    safetensors = pytest.importorskip("safetensors.torch")

    def model():
        one = fp8.convert(layer(), "delayed")
        return nn.ModuleList([one, nn.Sequential(one), one])

    saved, loaded = model(), model()
    saved[0](X).sum().backward()
    safetensors.save_model(saved, tmp_path / "model.safetensors")
    safetensors.load_model(loaded, tmp_path / "model.safetensors")
    for name, history in saved[0].named_buffers():
        assert history.any()
        assert torch.equal(loaded[0].get_buffer(name), history)


class Copied(nn.Linear):
    """A layer with a copy method of its own, which knows its parameters alone."""

    def __deepcopy__(self, memo):
        new = type(self)(self.in_features, self.out_features)
        new.weight.data.copy_(self.weight)
        new.bias.data.copy_(self.bias)
        return new


class Reduced(nn.Linear):
    """A layer with a form of its own in pickles."""

    def __reduce__(self):
        return type(self), (self.in_features, self.out_features), {**self._parameters}

    def __setstate__(self, state):
        self._parameters.update(state)


@pytest.mark.parametrize("recipe", ["tensor", "static", "delayed"])
@pytest.mark.parametrize("cls", [nn.Linear, Copied, Reduced])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_the_settings_and_scales_of_the_layer(way, cls, recipe):
    model = fp8.convert(nn.Sequential(cls(16, 16)), recipe)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    made = way(model)
    assert made[0].fp8_settings == model[0].fp8_settings
    assert made.state_dict().keys() == model.state_dict().keys()
    assert all(map(torch.equal, made.buffers(), model.buffers()))
    assert made[0].fp8_recipe.keeps_history == any(True for _ in made.buffers())
    assert not {b.data_ptr() for b in made.buffers()} & {b.data_ptr() for b in model.buffers()}
    assert torch.equal(made(x), model(x))
    fp8.revert(made)
    assert not any(name.startswith("fp8_") for name in vars(made[0]))
    assert model[0].fp8_recipe.name == recipe


def test_settings_are_frozen():
    layer = fp8.convert(nn.Linear(16, 16), "tensor")
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.fp8_settings.backend = "native"
    before = layer.fp8_settings
    with fp8.override(layer, ("*", None, "row")):
        assert (before.recipe.name, layer.fp8_settings.recipe.name) == ("tensor", "row")
    assert layer.fp8_settings is before
