"""The default recipe, "auto": what it is for which layer and product, and who asks for it."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from fp8 import RECIPES
from fp8.adapters import accelerate, lightning, torchao, transformer_engine
from fp8.recipes.recipe import needs_unit_scale
from fp8.training.fsdp import gather_in_fp8
from fp8.warnings import RecipeWarning
from tests.shared import (
    assert_same,
    filterwarnings,
    linears,
    pairs,
    parametrize,
    pickled,
    warns,
)
from unit_scaling.transforms import simulate_fp8, unit_scale

AUTO_BY_DEFAULT = [
    fp8.convert,
    fp8.autocast,
    fp8.initialize,
    gather_in_fp8,
    accelerate.prepare,
    lightning.FP8Precision,
    lightning.FP8FabricPrecision,
    torchao.convert,
    transformer_engine.convert,
]


@parametrize("function", AUTO_BY_DEFAULT)
def test_it_is_the_default_everywhere(function):
    assert inspect.signature(function).parameters["recipe"].default == "auto"


def plain():
    torch.manual_seed(0)
    return linears(32, 32, nn.GELU, 32)


def unit():
    return uu.Linear(32, 32)


def chosen(model):
    layers = [m for m in model.modules() if hasattr(m, "fp8_recipe")]
    return [layer.fp8_recipe.name for layer in layers]


MODELS = {
    "plain": (plain, ["tensor", "tensor"]),
    "pending": (lambda: unit_scale(plain()), ["static", "static"]),
    "unit_scale": (
        lambda: unit_scale(plain(), batch=torch.randn(8, 32)),
        ["static", "static"],
    ),
    "simulated": (lambda: simulate_fp8(plain()), ["tensor", "tensor"]),
    "uu": (lambda: nn.Sequential(unit(), uu.GELU(), unit()), ["unit", "unit"]),
    "uu simulated": (lambda: simulate_fp8(nn.Sequential(unit())), ["unit"]),
    "mixed": (lambda: nn.Sequential(unit(), nn.Linear(32, 32)), ["unit", "tensor"]),
    "part": (
        lambda: nn.Sequential(unit_scale(plain()), nn.Linear(32, 8)),
        ["static", "static", "tensor"],
    ),
}


@parametrize("name", MODELS)
def test_each_layer_has_the_recipe_that_it_needs(name):
    make, names = MODELS[name]
    model = fp8.convert(make())
    assert chosen(model) == names
    assert chosen(copy.deepcopy(model)) == names
    whys = [row.why for row in fp8.report(model) if row.done == "converted"]
    for why, recipe in pairs(whys, names):
        state = "not unit-scaled" if recipe == "tensor" else "unit-scaled"
        assert why.startswith(f"{recipe} (auto: {state})")


def test_the_order_of_unit_scale_and_convert_does_not_matter():
    first = unit_scale(fp8.convert(plain()))
    second = fp8.convert(unit_scale(plain()))
    assert chosen(first) == chosen(second)
    assert set(chosen(first)) == {"static"}
    x = torch.randn(64, 32)
    assert_same(first(x), second(x))
    assert_same(first(x), simulate_fp8(unit_scale(plain()))(x))
    assert chosen(pickled(first)) == chosen(first)


def test_a_recipe_by_name_stays():
    assert set(chosen(unit_scale(fp8.convert(plain(), "tensor")))) == {"tensor"}
    model = fp8.convert(plain(), fp8.Policy("row", keep=["readout"], others="auto"))
    assert set(chosen(model)) == {"row", "tensor"}
    assert set(chosen(unit_scale(model))) == {"row", "static"}


# --- Products


X, W, V = (torch.randn(2, 16, 16) for _ in range(3))
KERNEL = torch.randn(16, 16, 3)

PRODUCTS = {
    "linear": ((X, W[0]), F.linear),
    "matmul": ((X, W), torch.matmul),
    "einsum": (("bij,bkj->bik", X, W), torch.einsum),
    "conv1d": ((X, KERNEL), F.conv1d),
    "scaled_dot_product_attention": ((X, W, V), F.scaled_dot_product_attention),
}


def tiny(args):
    """Arguments that "unit" makes zero and "tensor" does not, as powers of two scale them."""
    return [a * 2.0**-20 if isinstance(a, torch.Tensor) else a for a in args]


@parametrize("name", PRODUCTS)
def test_autocast_chooses_for_each_product(name):
    args, function = PRODUCTS[name]
    ours = getattr(U, name)

    def call(function, recipe, *args):
        with fp8.autocast(recipe):
            return function(*args)

    for f, recipe, other in ((ours, "unit", "tensor"), (function, "tensor", "unit")):
        got = call(f, "auto", *tiny(args))
        assert_same(got, call(f, recipe, *tiny(args)))
        assert not torch.equal(got, call(f, other, *tiny(args)))


# --- "unit" by name


def test_unit_by_name_for_a_plain_model_warns_once():
    model = plain()
    pattern = "recipe 'unit', given by name, casts without scales, and 2 of 2"
    with warns(pattern, RecipeWarning) as seen:
        model = fp8.convert(fp8.convert(model, "unit"), "unit")
    assert len(seen) == 1
    assert seen[0].filename == __file__
    with warns("by name", RecipeWarning):
        fp8.initialize(plain(), None, "O1", recipe="unit")
    with warns("1 of 2 .*the first is '1'", RecipeWarning):
        fp8.convert(nn.Sequential(uu.Linear(8, 8), nn.Linear(8, 8)), "unit_e4m3")
    with fp8.strict(), pytest.raises(RecipeWarning):
        fp8.convert(plain(), "unit")


@filterwarnings("error")
def test_what_fits_does_not_warn():
    fp8.convert(nn.Sequential(uu.Linear(8, 8)), "unit")
    for recipe in RECIPES.values():
        if not needs_unit_scale(recipe):
            fp8.convert(plain(), recipe)
    fp8.convert(plain())
