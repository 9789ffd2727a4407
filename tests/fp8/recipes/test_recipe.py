import dataclasses
import json
from dataclasses import FrozenInstanceError

import pytest
import torch

from fp8 import FORMATS, RECIPES, Cast, Format, Recipe
from fp8.formats.quantize import OVERFLOWS, ROUNDINGS
from fp8.recipes.recipe import get_recipe
from fp8.recipes.rules import RULES
from fp8.recipes.scaling import SCALINGS
from tests.shared import pairs, parametrize, refuses

OPERANDS = ("input", "weight", "grad")
MINE = Format(
    name="mine", exponent_bits=3, mantissa_bits=1, bias=3, max=12.0, dtype=torch.half
)


def test_rows():
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert get_recipe(name) is get_recipe(recipe) is recipe
        products = recipe.forward, recipe.grad_input, recipe.grad_weight
        assert all(None not in pair or {*pair} == {None} for pair in products)
        assert recipe.casts == sum(products, ())
    assert {c.scaling for r in RECIPES.values() for c in r.casts if c} == set(SCALINGS)


def test_the_short_form_is_for_all_products_and_an_override_for_one():
    a, b, c, d = (Cast(format=f) for f in "e4m3 e5m2 e3m2 e2m3".split())
    short = Recipe(name="short", input=a, weight=b, grad=c)
    assert short.casts == (a, b, c, b, c, a)
    one = dataclasses.replace(short, grad_input_weight=d)
    assert one.casts == (a, b, c, d, c, a)
    none = dataclasses.replace(short, grad_weight_grad=None, grad_weight_input=d)
    assert none.casts == (a, b, c, b, None, d)


# --- checks at birth


@parametrize(
    "field, table",
    [
        ("format", FORMATS),
        ("scaling", SCALINGS),
        ("rounding", ROUNDINGS),
        ("overflow", OVERFLOWS),
    ],
)
def test_a_cast_checks_every_name(field, table):
    for name in table:
        if name != "nonfinite":
            Cast(**{"format": "e4m3", field: name})
    with refuses(f"unknown {field} 'fp7'; choose one of '{next(iter(table))}'"):
        Cast(**{"format": "e4m3", field: "fp7"})
    with pytest.raises(TypeError):
        Cast(**{"format": "e4m3", field: 8})


def test_a_dtype_in_json_that_is_none():
    values = Recipe(name="mine", input=Cast(format=MINE)).to_dict()
    for dtype in ("float9", "save"):
        values["input"]["format"]["dtype"] = dtype
        with refuses("format 'mine': dtype cannot be", TypeError):
            Recipe.from_dict(values)


@parametrize("scaling", SCALINGS)
def test_a_cast_knows_the_rules_and_tile_of_its_scaling(scaling):
    row = SCALINGS[scaling]
    usual = Cast(format="e4m3", scaling=scaling)
    assert (usual.rule, usual.tile) == (row.rules[0] if row.rules else None, row.tile)
    for rule in RULES:
        if rule in row.rules:
            assert Cast(format="e4m3", scaling=scaling, rule=rule).rule == rule
        else:
            with refuses(f"scaling '{scaling}' has no rule '{rule}'"):
                Cast(format="e4m3", scaling=scaling, rule=rule)
    if row.free:
        assert Cast(format="e4m3", scaling=scaling, tile=[8, 8]).tile == (8, 8)
    else:
        with refuses(r"has the tile \(.*\), not \(8, 8\)"):
            Cast(format="e4m3", scaling=scaling, tile=(8, 8))


@parametrize(
    "fields, message",
    [
        ({"format": "e2m1", "overflow": "nonfinite"}, "neither Inf nor NaN"),
        ({"scaling": "unit", "history": 3}, "history of scaling 'unit' must be 0 to 0"),
        (
            {"scaling": "delayed", "history": 5000},
            "scaling 'delayed' must be 1 to 4096",
        ),
        ({"margin": 1}, "has no margin"),
        (
            {"scaling": "block", "tile": 3},
            r"a tile is two numbers \(across, along\), not 3",
        ),
        ({"scaling": "row", "rule": "sideways"}, "unknown rule 'sideways'"),
        (
            {"scaling": "block", "tile": (0, 8)},
            "a side of a tile must be 1 to 65536, got 0",
        ),
        ({"scaling": "block", "tile": (1, 1)}, "each element a scale"),
        ({"hadamard": 12}, "power of two from 2 to 128, got 12"),
        ({"signs": "random"}, "random signs need a rotation"),
        (
            {"signs": "odd", "hadamard": 16},
            "unknown signs 'odd'; choose one of 'fixed'",
        ),
        ({"scaling": "delayed", "hadamard": 16}, "'delayed' has no rotation"),
        (
            {"scaling": "nv", "rule": "e4m3_eden", "rounding": "stochastic"},
            "values to nearest",
        ),
        ({"scaling": "nv", "rule": "e4m3_eden", "tile": (16, 16)}, "blocks of one row"),
        ({"scaling": "nv", "rule": "e4m3_eden", "hadamard": 8}, "blocks of one row"),
    ],
)
def test_a_cast_that_cannot_be_done_is_refused_at_birth(fields, message):
    with refuses(message, (ValueError, TypeError)):
        Cast(**{"format": "e4m3"} | fields)


def test_a_recipe_holds_casts():
    for fields, message in (
        ({"grad": "e5m2"}, r"Recipe.grad must be a Cast or None, not 'e5m2'"),
        (
            {"grad_weight_grad": 5},
            r'grad_weight_grad must be a Cast, None or "same", not 5',
        ),
        ({"name": 8}, "a name, not 8"),
    ):
        with refuses(message, TypeError):
            Recipe(**{"name": "mine"} | fields)
    delayed = RECIPES["delayed"]
    with refuses("grad_weight_grad cannot have scaling"):
        dataclasses.replace(delayed, grad_weight_grad=delayed.grad)


def test_both_operands_are_rotated_or_none():
    rotated, other = Cast(format="e2m1", hadamard=16), Cast(format="e2m1")
    random = dataclasses.replace(rotated, signs="random")
    Recipe(name="fine", grad_weight_grad=rotated, grad_weight_input=rotated)
    Recipe(name="fine", input=rotated, weight=rotated, grad=rotated)
    got = r"grad_weight .*got .*=\[\(16, 'fixed'\), \(0, 'fixed'\)\]"
    alike = "forward needs both operands rotated alike"
    for message, casts in (
        (got, (None, None, rotated, other)),
        (alike, (rotated, None, "same", other)),
        (alike, (rotated, random, "same", "same")),
    ):
        fields = ("input", "weight", "grad_weight_grad", "grad_weight_input")
        with refuses(message):
            Recipe(name="mine", **dict(pairs(fields, casts)))


def test_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        RECIPES["unit"].name = "other"
    with refuses("positional", TypeError):
        Cast("e4m3")
    assert len({*RECIPES.values(), Recipe(name="unit")}) == len(RECIPES) + 1
    assert Cast(format="e4m3") == Cast(format="e4m3")


# --- JSON


@parametrize(
    "recipe",
    [
        *RECIPES.values(),
        Recipe(name="mine", input=Cast(format=MINE), grad_weight_input=None),
    ],
    ids=lambda recipe: recipe.name,
)
def test_there_and_back_through_json(recipe):
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_what_is_read_may_be_short_and_not_wrong():
    cast = {"format": "e4m3", "scaling": "row"}
    others = {"name": "x", "weight": None, "grad": None}
    assert Recipe.from_dict({**others, "input": cast}).input == Cast(**cast)
    for values, message in (
        (
            {"name": "x", "inputs": None},
            "unknown key of a Recipe 'inputs'; choose one of 'name'",
        ),
        ({**others, "input": {"formats": "e4m3"}}, "unknown key of a Cast 'formats'"),
        (
            {**others, "input": {**cast, "format": {"bits": 8}}},
            "unknown key of a Format 'bits'",
        ),
        ({**others, "input": {**cast, "format": "fp7"}}, "unknown format 'fp7'"),
        ({**others, "input": {"format": "e4m3"}}, "a Cast needs .* without 'scaling'"),
    ):
        with refuses(message):
            Recipe.from_dict(values)
    with refuses("from a dict, not from a list", TypeError):
        Recipe.from_dict([])
    values = RECIPES["tensor"].to_dict()
    # Nobody would notice an operand that is not cast.
    for missing in ("name", *OPERANDS):
        given = {key: value for key, value in values.items() if key != missing}
        with refuses(f"a Recipe needs the keys .* without '{missing}'"):
            Recipe.from_dict(given)
    assert Recipe.from_dict({**values, "grad": None}).grad is None
