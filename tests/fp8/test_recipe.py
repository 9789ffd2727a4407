from dataclasses import FrozenInstanceError

import pytest

import fp8
from fp8 import FORMATS, RECIPES, Cast, Recipe, get_recipe
from fp8.quantize import OVERFLOWS, ROUNDINGS
from fp8.scaling import SCALINGS


@pytest.mark.parametrize("name", RECIPES)
def test_rows(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert get_recipe(name) is get_recipe(recipe) is recipe
    assert {cast.scaling for cast in (recipe.input, recipe.weight, recipe.grad)} == {name}
    assert (recipe.input.format, recipe.weight.format, recipe.grad.format) == (
        "e4m3",
        "e4m3",
        "e5m2",
    )


@pytest.mark.parametrize(
    ("field", "table"),
    [("format", FORMATS), ("scaling", SCALINGS), ("rounding", ROUNDINGS), ("overflow", OVERFLOWS)],
)
def test_a_cast_checks_every_name(field, table):
    for name in table:
        if (field, name) != ("overflow", "nonfinite"):
            Cast(**{"format": "e4m3", field: name})
    with pytest.raises(
        ValueError, match=f"unknown {field} 'fp7'; choose one of '{next(iter(table))}'"
    ):
        Cast(**{"format": "e4m3", field: "fp7"})
    with pytest.raises(TypeError):
        Cast(**{"format": "e4m3", field: 8})


def test_a_cast_that_cannot_be_done_is_refused_at_birth():
    with pytest.raises(ValueError, match="neither Inf nor NaN"):
        Cast(format="e2m1", overflow="nonfinite")
    assert Cast(format="e5m2", overflow="nonfinite").overflow == "nonfinite"


def test_a_recipe_holds_casts():
    with pytest.raises(TypeError, match=r"Recipe.grad must be a Cast or None, not 'e5m2'"):
        Recipe(name="mine", grad="e5m2")
    with pytest.raises(ValueError, match="unknown recipe 'mine'; choose one of 'unit'"):
        get_recipe("mine")
    with pytest.raises(TypeError, match="a name or a Recipe, not int"):
        get_recipe(8)


def test_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        RECIPES["unit"].name = "other"
    with pytest.raises(TypeError, match="positional"):
        Cast("e4m3")
    assert len({*RECIPES.values(), Recipe(name="unit")}) == len(RECIPES) + 1
    assert Cast(format="e4m3") == Cast(format="e4m3")


def test_exported():
    assert fp8.RECIPES is RECIPES
