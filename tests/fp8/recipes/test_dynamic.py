"""Compiled for dynamic shapes, every recipe computes what it does in eager mode."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from fp8 import RECIPES, Cast, Format, Recipe
from tests.fp8.blocks import block, keeper
from tests.fp8.products.test_matmul import randn

# Numbers that the compiler meets in objects of its caller, not in a table of the package.
MINE = Format(name="mine", exponent_bits=3, mantissa_bits=4, bias=3, max=15.5, infinity=True)
VECTOR = Cast(format=MINE, scaling="row", margin=1)
OWN = Recipe(name="own", input=VECTOR, weight=Cast(format=MINE, scaling="tensor"), grad=VECTOR)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def products(recipe: Recipe, layer_alone: bool):
    """x -> the sum of a converted layer, or of one, a product and a convolution, and their
    parameters."""
    torch.manual_seed(0)
    layer, conv = fp8.convert(nn.Linear(32, 16), recipe), nn.Conv1d(32, 8, 3)
    keeps = keeper(recipe) if recipe.keeps_history else None

    def run(x: Tensor) -> Tensor:
        y = layer(x)
        if layer_alone:
            return y.square().sum()
        with block(recipe, layer=keeps):
            z = F.conv1d(x.mT[None], conv.weight, conv.bias)
            return (y.mT @ x).square().sum() + z.square().sum()

    return run, [*layer.parameters(), *(() if layer_alone else conv.parameters())]


def results(run, parameters, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)  # for stochastic rounding
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters])]


def check(recipe: Recipe, backend: str, dynamic: bool | None, layer_alone: bool) -> None:
    (run, parameters), (twin, others) = (products(recipe, layer_alone) for _ in range(2))
    if recipe.keeps_history:  # its first pass is not compiled
        for function, its in ((run, parameters), (twin, others)):
            results(function, its, randn(12, 32))
    compiled = torch.compile(twin, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (36, 70):
        x = randn(rows, 32, seed=rows)
        for got, want in zip(
            results(compiled, others, x), results(run, parameters, x), strict=True
        ):
            # The same operations, so equal; aot may decompose a square or a sum.
            close = {"rtol": 0, "atol": 0} if backend == "eager" else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(got, want, **close)


def each_recipe(*names: str):
    """Every recipe; those that are not named in exhaustive runs alone."""
    recipes = [OWN, *RECIPES.values()]
    rare = {r.name: () if r.name in names else pytest.mark.exhaustive for r in recipes}
    params = [pytest.param(recipe, id=recipe.name, marks=rare[recipe.name]) for recipe in recipes]
    return pytest.mark.parametrize("recipe", params)


@each_recipe("own", "delayed", "row_gw_hp", "mxfp4", "nvfp4")
def test_a_layer(recipe: Recipe):
    check(recipe, "eager", True, layer_alone=True)


@each_recipe("tensor", "delayed")
def test_products_of_all_kinds(recipe: Recipe):
    check(recipe, "eager", True, layer_alone=False)


def test_a_second_shape_makes_it_dynamic():
    check(RECIPES["tensor"], "aot_eager", None, layer_alone=True)


def test_quantize():
    def run(x: Tensor) -> Tensor:
        return fp8.quantize(x, MINE, scale=0.5) + fp8.quantize(x, "bf16")

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    for rows in (5, 9):
        x = randn(rows, 8).detach().abs()
        assert torch.equal(compiled(x), run(x))
