"""TransformerEngine's own layers and contexts in a model and out of it, without their kernels.

What `swap` does for every library is tested with torchao's layers, whose products run here.
"""

import copy

import pytest
import torch
from torch import nn

import fp8
from fp8.adapters import transformer_engine
from tests.fp8.adapters.te_library import RAN, recipe_in_force
from tests.fp8.adapters.test_te_recipe import KINDS
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    by_path,
    linears,
    pairs,
    parametrize,
    proves,
    refuses,
    tied,
    warns,
)

pytestmark = pytest.mark.usefixtures("te")


def linear():
    return nn.Linear(32, 32)


def various():
    """An odd layer before others, ties, two names, a frozen layer, norms of every kind."""
    a = linear()
    return tied(
        Net(
            embed=nn.Embedding(48, 32),
            odd=nn.Linear(32, 10),
            back=nn.Linear(10, 32),
            a=a,
            b=a,
            frozen=linear().requires_grad_(False),
            norm=nn.LayerNorm(32, eps=1e-3),
            rms=nn.RMSNorm(32),
            plain=nn.LayerNorm(32, elementwise_affine=False),
            unbiased=nn.LayerNorm(32, bias=False),
            wide=nn.LayerNorm((4, 32)),
            head=nn.Linear(32, 48, bias=False),
        )
    )


def mixed(m, x):
    x = x + m.mix(m.norm(x))
    return x + m.mlp(x)


def block(bias=True):
    """Modules of its own in an order that its forward alone knows, and an nn.Sequential."""
    sizes = (32, 32), (32, 64), (64, 32), (32, 32)
    mix, up, down, last = (nn.Linear(*size, bias=bias) for size in sizes)
    mlp = nn.Sequential(nn.RMSNorm(32), up, nn.SiLU(), down, nn.RMSNorm(32), last)
    return Net(mixed, mix=mix, norm=nn.LayerNorm(32, eps=1e-3), mlp=mlp)


X = torch.linspace(-2, 2, 3 * 32).view(3, 32)
FUSED = [("norm", "mix"), ("mlp.0", "mlp.1", "mlp.2", "mlp.3"), ("mlp.4", "mlp.5")]


def convert(model, recipe="tensor"):
    return fp8.convert(model, recipe, backend="transformer_engine")


def report_of_nothing(model):
    """The report of a conversion that converts nothing, which it says."""
    with warns("was chosen and converted", fp8.warnings.ConvertWarning):
        return fp8.report(convert(model))


def ran(model, *args):
    """The recipes in force in the products of a call."""
    RAN.clear()
    model(*args)
    return {None if recipe is None else type(recipe).__name__ for recipe in RAN}


@proves(
    "TransformerEngine",
    "nn.Linear to te.Linear",
    "nn.LayerNorm to te.LayerNorm",
    how="library",
)
def test_each_layer_is_converted_or_said_to_be_left_alone(te):
    model = convert(various())
    rows = by_path(fp8.report(model), "done", "why")
    done = ("converted", "TransformerEngine, Float8CurrentScaling")
    assert rows == {
        "embed": ("left alone", "TransformerEngine has no such layer"),
        "odd": ("left alone", "10 is no multiple of 16"),
        "back": ("left alone", "10 is no multiple of 16"),
        **dict.fromkeys("a frozen norm rms wide head".split(), done),
        "plain": ("left alone", "te.LayerNorm has no form without weight"),
        "unbiased": ("left alone", "te.LayerNorm has no form without bias"),
    }
    assert isinstance(model.a, te.Linear)
    assert isinstance(model.norm, te.LayerNorm)
    assert isinstance(model.rms, te.RMSNorm)
    rows = by_path(fp8.report(convert(various(), "delayed")), "why")
    assert rows["a"] == "has two names, and DelayedScaling takes one call a pass"
    assert rows["frozen"] == "TransformerEngine, DelayedScaling"


@parametrize("recipe, size", [("mxfp8", 32), ("block", 128), ("tensor", 16)])
def test_sizes_are_those_that_the_recipe_takes(recipe, size):
    model = linears(size, size, 3 * size // 2)
    rows = fp8.report(convert(model, recipe))
    assert [row.left_alone for row in rows] == [False, True]


def modules_of(model):
    return {n: (type(m), set(vars(m)), m.training) for n, m in model.named_modules()}


def parameters_of(model):
    return [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]


def test_there_and_back_a_model_with_fused_layers_stays_itself():
    """The same parameters without copies or random numbers, attributes, and no `_extra_state` in
    checkpoints; a copy has them too. Nothing is left after the way back."""
    model = block()
    model.norm.comment = "mine"
    model.norm.eval()
    modules, parameters = modules_of(model), parameters_of(model)
    plain, keys, state = model(X), list(model.state_dict()), torch.get_rng_state()
    assert transformer_engine.convert(model, "unit", fuse=FUSED) is model
    for module in (model, copy.deepcopy(model)):
        assert torch.allclose(module(X), plain, rtol=1e-5, atol=1e-5)
        assert list(module.state_dict()) == keys
        assert (module.norm.comment, module.norm.training) == ("mine", False)
    assert parameters_of(model) == parameters
    assert_same(torch.get_rng_state(), state)
    assert fp8.revert(model) is model
    assert modules_of(model) == modules
    assert parameters_of(model) == parameters
    assert torch.allclose(model(X), plain, rtol=1e-5, atol=1e-5)


@parametrize("bias", [True, False])
def test_fused(te, bias):
    """As accurate as apart, gradients too, with the weights that were loaded or assigned last."""
    model = transformer_engine.convert(block(bias), "tensor", fuse=FUSED)
    kinds = (te.LayerNormLinear, te.LayerNormMLP, te.LayerNormLinear)
    how = "TransformerEngine, Float8CurrentScaling, in te."
    rows = {n: how + k.__name__ for names, k in pairs(FUSED, kinds) for n in names}
    assert by_path(fp8.report(model), "why") == rows
    assert all(isinstance(model.get_submodule(n[1]), k) for n, k in pairs(FUSED, kinds))
    for assign in (False, True):
        plain = block(bias)
        model.load_state_dict(plain.state_dict(), assign=assign)
        assert ran(model, X) == {"Float8CurrentScaling"}
        assert len(RAN) == 4
        found, expected = (
            torch.autograd.grad(m(X).square().sum(), tuple(m.parameters()))
            for m in (model, plain)
        )
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_neighbours_in_a_sequential_are_fused(te, monkeypatch):
    """Rows that are added are copies: what a norm makes of them then has no larger maximum."""
    inputs, forward = [], te.LayerNormLinear.forward
    record = lambda self, x: inputs.append(x) or forward(self, x)  # noqa: E731
    monkeypatch.setattr(te.LayerNormLinear, "forward", record)
    model = block()
    # A norm before a layer that is converted to none.
    model.mlp.extend([nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 10)])
    wanted = model.mlp(X)
    transformer_engine.convert(model, "unit", fuse=True)
    fused = {row.path for row in fp8.report(model) if ", in te." in row.why}
    assert fused == {f"mlp.{i}" for i in range(6)}
    assert torch.allclose(model.mlp(X), wanted, rtol=1e-5, atol=1e-5)
    assert inputs[0].shape == (16, 32)
    assert_same(inputs[0][3:], inputs[0][2].expand(13, -1))


@parametrize(
    "names, message",
    [
        (
            ("mix", "norm"),
            "expected a norm and a linear layer, or these, an activation and a",
        ),
        (("norm", "odd"), "odd: 10 is no multiple of 16"),
        (("wide", "mix"), r"the norm is over \(4, 32\), not \(32,\)"),
        (("norm", "short"), "the weights have several dtypes"),
        (("norm", "twice"), "twice has two names"),
        (("norm", "hooked"), "hooked has hooks, which would see other values"),
        (
            ("norm", "mlp.1", "gelu", "mlp.3"),
            r"its activations are nn.GELU\('tanh'\), nn.ReLU",
        ),
        (("norm", "mlp.1", "mlp.2", "back"), "does not return to the size of the norm"),
        (("norm", "mlp.1", "mlp.2", "unbiased"), "one linear layer has a bias"),
    ],
)
def test_what_is_not_fused(names, message):
    model = block()
    model.odd, model.short = nn.Linear(32, 10), linear().half()
    model.gelu, model.back = nn.GELU(), nn.Linear(64, 16)
    model.twice = model.again = linear()
    model.wide, model.unbiased = nn.LayerNorm((4, 32)), nn.Linear(64, 32, bias=False)
    model.hooked = linear()
    model.hooked.register_forward_hook(lambda *_: None)
    with refuses(f"cannot fuse {', '.join(names)}: .*{message}"):
        transformer_engine.convert(model, "tensor", fuse=[names])
    assert type(model.mix) is nn.Linear
    with refuses("norm is in another group"):
        transformer_engine.convert(model, fuse=[("norm", "mix"), ("norm", "mlp.1")])
    with refuses("sequences of names, got the name 'norm'", TypeError):
        transformer_engine.convert(model, fuse=("norm", "mix"))
    with refuses("nrm", AttributeError):
        transformer_engine.convert(model, fuse=[("nrm", "mix")])


@proves("TransformerEngine", "FP8 products, everything else as it is", how="library")
@parametrize("recipe", KINDS)
def test_under_its_recipe_in_training_and_in_evaluation_if_asked(te, recipe):
    """TransformerEngine checks at the entry of its context whether the device has the recipe."""
    x = torch.randn(5, 128)
    model = convert(nn.Sequential(nn.Linear(128, 128), nn.RMSNorm(128)), recipe)
    assert ran(model, x) == {KINDS[recipe]}
    assert ran(model.eval(), x) == {None}
    own = transformer_engine.te_recipe(recipe)
    layer = transformer_engine.convert(nn.Linear(128, 128), own, in_eval=True).eval()
    assert ran(layer, x) == {KINDS[recipe]}
    assert RAN[0] is own
    assert type(fp8.revert(layer)) is nn.Linear
    with te.autocast(recipe=own):
        assert recipe_in_force() == own
    assert ran(fp8.revert(model), x) == set()


def test_back_from_layers_that_others_put_there(te):
    """As accelerate's: bias=False is an empty tensor, the state_dict has `_extra_state`."""
    layers = [
        te.Linear(32, 16, bias=False, device="cpu"),
        te.LayerNorm(16, device="cpu"),
        te.RMSNorm(16, zero_centered_gamma=True, device="cpu"),
        te.LayerNormLinear(16, 16, device="cpu"),
    ]
    model, x = nn.Sequential(*layers), torch.randn(16, 32)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    want = model[:2](x)
    back = transformer_engine.revert(model)
    assert [type(m) for m in back] == [
        nn.Linear,
        nn.LayerNorm,
        te.RMSNorm,
        te.LayerNormLinear,
    ]
    assert back[0].bias is None
    assert_same(back[:2](x), want)


def test_layers_that_compute_otherwise_are_left_alone():
    """Subclasses, computed weights, and layers with factors that TransformerEngine's lack."""
    import unit_scaling as uu

    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    with warns("weight_norm", FutureWarning):
        computed = nn.utils.weight_norm(linear())
    subclass = "a subclass: its forward may be its own"
    for layer, why in (
        (Doubled(32, 32), subclass),
        (nn.utils.parametrizations.weight_norm(linear()), subclass),
        (uu.Linear(32, 32), subclass),
        (computed, "its weight is computed, not a parameter"),
        (linear().double(), "TransformerEngine has no torch.float64"),
    ):
        assert report_of_nothing(nn.Sequential(layer))[0].why == why
