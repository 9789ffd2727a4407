"""Recipes in TransformerEngine's terms: every field given, none ignored, none from elsewhere."""

import dataclasses
import importlib.util
import sys

import pytest
import torch

from fp8 import RECIPES, Cast, Recipe
from fp8.adapters import transformer_engine
from fp8.adapters.transformer_engine import delayed_scaling
from tests.shared import parametrize, proves, refuses

KINDS = {
    "unit": "DelayedScaling",
    "unit_e4m3": "DelayedScaling",
    "delayed": "DelayedScaling",
    "tensor": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "block_exact": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4_nvidia": "NVFP4BlockScaling",
}
ENVIRONMENT = {
    "NVTE_BACKWARD_OVERRIDE": "dequantized",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
    "NVTE_NVFP4_DISABLE_RHT": "1",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
    "NVTE_NVFP4_4OVER6": "all",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
    "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
}
"""Everything that the defaults of the package read from the environment, turned around."""


@pytest.fixture
def library(te, monkeypatch):
    """The package's recipes, imported under that environment, which it reads at import."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    name = "transformer_engine.common.recipe"
    spec = importlib.util.spec_from_file_location(name, sys.modules[name].__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@parametrize("name", KINDS)
def test_every_field_is_given(library, name, monkeypatch):
    made = getattr(library, KINDS[name])
    given = {}

    def record(**fields):
        given.update(fields)
        return made(**fields)

    record.__dataclass_fields__ = made.__dataclass_fields__
    monkeypatch.setattr(library, KINDS[name], record)
    recipe = transformer_engine.te_recipe(name)
    assert set(given) == {field.name for field in dataclasses.fields(made)}
    assert all(getattr(recipe, field) == value for field, value in given.items())
    assert recipe.backward_override is None


def test_what_the_recipes_say(library):
    recipe = transformer_engine.te_recipe("delayed")
    hybrid = library.Format.HYBRID
    assert (recipe.margin, recipe.fp8_format, recipe.reduce_amax) == (0, hybrid, True)
    assert (recipe.amax_history_len, recipe.amax_compute_algo) == (16, "max")
    assert transformer_engine.te_recipe("unit_e4m3").fp8_format == library.Format.E4M3
    assert not transformer_engine.te_recipe("block").use_f32_scales
    exact = transformer_engine.te_recipe("block_exact")
    assert exact.use_f32_scales
    operands = (exact.fp8_quant_fwd_inp, exact.fp8_quant_fwd_weight)
    assert [params.amax_epsilon for params in operands] == [1e-10, 0.0]
    assert not transformer_engine.te_recipe("nvfp4_nvidia").disable_rht
    unit, scale = transformer_engine.te_recipe("unit"), torch.tensor([3.0, 0.5])
    algorithm = unit.scaling_factor_compute_algo
    assert algorithm(torch.tensor([100.0, 0.0]), scale, 448.0, None).tolist() == [
        1.0,
        1.0,
    ]
    assert not unit.reduce_amax
    cast = Cast(format="e4m3", scaling="delayed", history=1, margin=3)
    own = transformer_engine.te_recipe(
        Recipe(name="own", input=cast, weight=cast, grad=cast)
    )
    assert (own.margin, own.amax_history_len, own.amax_compute_algo) == (
        3,
        1,
        "most_recent",
    )


@proves(
    "TransformerEngine",
    "margin",
    "fp8_format",
    "amax_history_len",
    "amax_compute_algo",
    "interval",
    "override_linear_precision",
    how="library",
)
def test_documented_options_are_honoured_or_refused(library):
    """None is dropped for being some default, and none ignored for being unknown."""
    made = delayed_scaling(
        margin=2,
        fp8_format="E4M3",
        amax_history_len=32,
        amax_compute_algo="most_recent",
    )
    assert (made.margin, made.fp8_format) == (2, library.Format.E4M3)
    assert (made.amax_history_len, made.amax_compute_algo) == (32, "most_recent")
    delayed_scaling(interval=1, override_linear_precision=(False, False, False))
    for option, value, message in (
        ("interval", 4, r"interval must be 1, got 4: .* at each step"),
        (
            "override_linear_precision",
            (False, False, True),
            r"got \(False, False, True",
        ),
        (
            "fp8_format",
            "E5M2",
            "unknown fp8_format 'E5M2'; choose one of 'E4M3', 'HYBRID'",
        ),
        (
            "amax_compute_algo",
            "mean",
            "unknown amax_compute_algo 'mean'; choose one of 'max'",
        ),
    ):
        with refuses(message):
            delayed_scaling(**{option: value})
    with refuses(r"DelayedScaling .* has no 'interval'"):
        transformer_engine._make("DelayedScaling", interval=7)  # the package ignores it


def test_recipes_that_it_does_not_have(library):
    for name in RECIPES.keys() - KINDS.keys():
        with refuses(rf"no recipe for '{name}'; it has 'unit'"):
            transformer_engine.te_recipe(name)
    odd = [
        Cast(format="e4m3", scaling="tensor", rule="floor"),
        Cast(format="e4m3", scaling="tensor", margin=1),
        Cast(format="e4m3", scaling="tensor", rounding="stochastic"),
        Cast(format="e5m2", scaling="tensor"),
    ]
    for cast in odd:
        with refuses("no recipe for 'odd'"):
            transformer_engine.te_recipe(
                Recipe(name="odd", input=cast, weight=cast, grad=cast)
            )
