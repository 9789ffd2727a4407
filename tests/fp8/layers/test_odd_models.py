"""Layers and classes that are not as most are: converted and reverted, or left alone by name."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import parametrize as computed

import fp8
from tests.shared import (
    Net,
    assert_same,
    filterwarnings,
    normal,
    parametrize,
    pickled,
    warns,
)

X = normal(16, 32)


FORMS = {nn.Conv1d: {"kernel_size": 1}}


def layer(cls=nn.Linear, **options):
    torch.manual_seed(0)
    return cls(32, 32, **options)


@parametrize("undo", ["revert", "convert"])
@parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_after_it_was_converted(wrap, undo):
    """Torch derives a class from ours, with a property for the weight, which has to stay."""
    model = nn.Sequential(fp8.convert(layer(), "unit"))
    wrap(model[0])
    model.eval()  # spectral_norm changes in training
    weight = model[0].weight
    with fp8.autocast("unit"):
        expected = nn.functional.linear(X, weight, model[0].bias)
    assert_same(model(X), expected)
    if undo == "convert":
        fp8.convert(model, "tensor")
        assert fp8.report(model)[0].done == "converted"
    fp8.revert(model)
    assert_same(model(X), nn.functional.linear(X, model[0].weight, model[0].bias))
    computed.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear


def attention():
    return nn.MultiheadAttention(8, 2)


def low_rank(rows, columns):
    """What makes a weight one with an update of low rank, as adapters do."""
    up, down = (nn.Parameter(normal(*s)) for s in ((rows, 2), (2, columns)))
    return Net(lambda m, w: w + (m.up @ m.down).view_as(w), up=up, down=down)


@parametrize("after", [False, True])
@parametrize("recipe", ["tensor", "static"])
@parametrize(
    "make, x, name, sizes",
    [
        (layer, X, "weight", None),
        (lambda: nn.Conv1d(4, 6, 3), normal(2, 4, 8), "weight", (6, 12)),
        (attention, normal(3, 2, 8), "in_proj_weight", (24, 8)),
    ],
)
def test_products_that_compute_a_weight_are_not_the_layer_s(
    make, x, name, sizes, recipe, after
):
    """They are not cast, and do not enter the scales of the layer."""

    def run(module):
        torch.manual_seed(0)
        if isinstance(module, nn.MultiheadAttention):
            return [module(x, x, x)[0] for _ in range(3)]
        return [module(x) for _ in range(3)]

    module = make()
    low = low_rank(*(sizes or module.weight.shape))
    merged = deepcopy(module)
    getattr(merged, name).data = low(getattr(module, name)).detach()
    fp8.convert(merged, recipe, backend="simulate")
    if after:
        fp8.convert(module, recipe, backend="simulate")
    computed.register_parametrization(module, name, low)
    if not after:
        fp8.convert(module, recipe, backend="simulate")
    assert_same(run(module), run(merged))
    buffers = dict(module.named_buffers())
    assert_same(dict(merged.named_buffers()), buffers)
    kept = type(fp8.revert(module).parametrizations[name])
    assert kept is computed.ParametrizationList


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
    assert converted.hello() == "Mixed"
    assert type(converted).__bases__ == (Mixin, nn.Linear)


@parametrize("cls", [nn.Linear, nn.Conv1d, nn.LayerNorm])
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
    assert_same(plain(x), expected)


@filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_weights_that_no_recipe_casts_are_left_alone():
    sparse = layer(bias=False)
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse_csr())
    model = nn.ModuleList([layer(dtype=torch.complex64), sparse])
    expected = [model[0](X.to(torch.complex64)), model[1](X)]
    with warns("torch.complex64", fp8.warnings.ConvertWarning):
        fp8.convert(model)
    why = [row.why for row in fp8.report(model).left_alone]
    assert why == [
        "no recipe casts its weight: torch.complex64, torch.strided",
        "no recipe casts its weight: torch.float32, torch.sparse_csr",
    ]
    assert_same(model[0](X.to(torch.complex64)), expected[0])
    assert_same(model[1](X), expected[1])


class Reduced(nn.Linear):
    """A layer with a form of its own in pickles."""

    def __reduce__(self):
        return type(self), (self.in_features, self.out_features), {**self._parameters}

    def __setstate__(self, state):
        self._parameters.update(state)


@parametrize("recipe", ["tensor", "static", "delayed"])
@parametrize("cls", [nn.Linear, Reduced])
@parametrize("way", [deepcopy, pickled])
def test_copies_have_the_settings_and_scales_of_the_layer(way, cls, recipe):
    model = fp8.convert(nn.Sequential(cls(16, 16)), recipe)
    x = normal(4, 16)
    model(x).square().sum().backward()
    made = way(model)
    assert made[0].fp8_settings == model[0].fp8_settings
    assert made.state_dict().keys() == model.state_dict().keys()
    assert_same([*made.buffers()], [*model.buffers()])
    assert made[0].fp8_recipe.keeps_history == any(True for _ in made.buffers())
    mine, theirs = ({b.data_ptr() for b in m.buffers()} for m in (made, model))
    assert not mine & theirs
    assert_same(made(x), model(x))
    fp8.revert(made)
    assert not any(name.startswith("fp8_") for name in vars(made[0]))
    assert model[0].fp8_recipe.name == recipe


def test_a_vector_for_each_head_is_no_stack_of_matrices():
    """The bias of positions in x-transformers' PolarEmbedding."""
    positions = Net(lambda m, x: x + m.bias, bias=nn.Parameter(torch.zeros(4, 1, 32)))
    rows = fp8.report(fp8.convert(nn.Sequential(positions, layer()), "tensor"))
    assert [row.done for row in rows] == ["left alone", "converted"]
