"""Compiled for dynamic shapes, every recipe computes what it does in eager mode."""

import copy

import pytest
import torch
from torch import nn

import fp8
from fp8 import RECIPES, Cast, Format, Recipe
from tests.shared import assert_close, normal, parametrize, randn

# Numbers that the compiler meets in objects of its caller, not in a table of the package.
MINE = Format(
    name="mine", exponent_bits=3, mantissa_bits=4, bias=3, max=15.5, infinity=True
)
VECTOR = Cast(format=MINE, scaling="row", margin=1)
OWN = Recipe(
    name="own", input=VECTOR, weight=Cast(format=MINE, scaling="tensor"), grad=VECTOR
)


def results(run, layer, x):
    torch.manual_seed(1)  # for stochastic rounding
    y = run(x).square().sum()
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()])]


def check(recipe, backend, dynamic):
    layer = fp8.convert(nn.Linear(32, 16), recipe)
    if recipe.keeps_history:  # its first pass is not compiled
        results(layer, layer, randn(12, 32))
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (36, 70):
        x = randn(rows, 32, seed=rows)
        # The same operations, so equal; aot may decompose a square or a sum.
        near = 0 if backend == "eager" else 1e-5
        found, expected = results(compiled, twin, x), results(layer, layer, x)
        assert_close(found, expected, rtol=near, atol=near)


def each_recipe(*names):
    """Every recipe; those that are not named in exhaustive runs alone."""
    recipes = [OWN, *RECIPES.values()]
    rare = {r.name: () if r.name in names else pytest.mark.exhaustive for r in recipes}
    params = [pytest.param(r, id=r.name, marks=rare[r.name]) for r in recipes]
    return parametrize("recipe", params)


@each_recipe("own", "delayed", "row_gw_hp", "mxfp4", "nvfp4")
def test_a_layer(recipe):
    check(recipe, "eager", True)


def test_a_second_shape_makes_it_dynamic():
    check(RECIPES["tensor"], "aot_eager", None)


def test_quantize():
    def run(x):
        return fp8.quantize(x, MINE, scale=0.5) + fp8.quantize(x, "bf16")

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    for rows in (5, 9):
        x = normal(rows, 8).abs()
        assert torch.equal(compiled(x), run(x))
