"""Rules as rows: registered ones read the values of tiles, wherever a cast runs."""

import copy
import dataclasses
import io
import json
import math
import pickle

import pytest
import torch
from torch import nn

import fp8
from fp8 import FORMATS, Cast, Policy, Recipe, Rule
from fp8.casts.casting import cast_forward
from fp8.recipes.recipe import RECIPES
from fp8.recipes.rules import LOWERED, RULES, exact
from fp8.recipes.scaling import SCALINGS
from fp8.training.fsdp import gather_in_fp8
from tests import reference
from tests.shared import (
    assert_close,
    assert_same,
    in_one_graph,
    linears,
    normal,
    parametrize,
    refuses,
    sampled,
)

pytestmark = pytest.mark.usefixtures("own_rows")

PLACES = (-2, -1)


def percentile(values, format):
    return values.abs().flatten(-2).quantile(0.9, dim=-1)[..., None, None]


def rms(values, format):
    """In float64, where the order of the sum makes no difference."""
    wide = values.double().square().mean(PLACES, keepdim=True)
    return (2 * wide.sqrt()).to(values.dtype)


def smooth(values, format):
    """A scale for each place along the sum."""
    places = values.abs().amax(-2, keepdim=True).clamp(min=1e-20).sqrt()
    return places * (values / places).abs().amax(PLACES, keepdim=True)


MAGNITUDES = {function.__name__: function for function in (percentile, rms, smooth)}
FORMS = {
    "power": Rule(name="p"),
    "float32": Rule(name="f", scale=exact, stored="float32"),
}


def registered(magnitude, stored="power", name="mine"):
    row = RULES["e4m3"] if stored == "e4m3" else FORMS[stored]
    return dataclasses.replace(row, name=name, magnitude=magnitude).register()


def recipe_of(cast, name="own"):
    return Recipe(name=name, input=cast, weight=cast, grad=cast)


def expected(x, cast, magnitude, axis=-1):
    """The cast by its definition, with the rule "up" or "exact" for each magnitude."""
    if axis == -2:
        return expected(x.mT, cast, magnitude).mT
    rule = "up" if RULES[cast.rule].stored == "power" else "exact"
    format, least = FORMATS[cast.format], -127 if cast.scaling == "mx" else -126

    def scale(tile):
        values = torch.where(tile.isfinite(), tile, 0.0)
        found = magnitude(values, format)
        largest = float(values.abs().max())
        usable = [m if 0 < m < math.inf else largest for m in found.flatten().tolist()]
        scales = [reference.scale_of(m, format, rule, least=least) for m in usable]
        return torch.tensor(scales).view(found.shape)

    rows = x.flatten(0, -2) if cast.tile == (0, 0) else x
    return reference.cast(rows, cast, scale=scale).view(x.shape)


POWERS = {n: row for n, row in SCALINGS.items() if "power" in row.forms}
TILES = [(name, row.tile) for name, row in POWERS.items() if name != "delayed"]
TILES += [("block", (4, 16)), ("block", (4, 1)), ("mx", (2, 8))]
CASES = [
    (name, scaling, tile)
    for name in MAGNITUDES
    for scaling, tile in TILES
    if name != "smooth" or tile[0] != 1
]


@parametrize("axis", [-1, -2])
@parametrize("name, scaling, tile", CASES)
def test_a_rule_gets_the_matrix_of_each_tile(name, scaling, tile, axis):
    """Bit for bit, with sizes that are no multiples (a multiple across, where zeros would count),
    and with Inf and NaN."""
    for stored in FORMS.keys() & {*SCALINGS[scaling].forms}:
        registered(MAGNITUDES[name], stored, f"{name}_{stored}")
        cast = Cast(format="e4m3", scaling=scaling, tile=tile, rule=f"{name}_{stored}")
        for shape in ((12, 33), (1, 7), (2, 3, 8, 20)):
            x = normal(*shape) * torch.exp2(normal(*shape[:-1], 1, seed=1) * 8)
            x.view(-1)[2::11] *= 1000
            for bad in (0.0, math.inf, math.nan):
                x.view(-1)[3] = bad
                got = cast_forward(x, cast, axis)
                want = expected(x, cast, MAGNITUDES[name], axis).float()
                assert_same(got, want, equal_nan=True)


def test_the_largest_magnitude_counts_where_a_rule_gives_none():
    """A percentile of a tile with few values is 0; the mean of large squares is Inf."""
    registered(percentile)
    cast = Cast(format="e4m3", scaling="row", rule="mine")
    usual = dataclasses.replace(cast, rule="up")
    x = torch.zeros(2, 64)
    x[0, 3], x[1, :4] = 1e-5, 3e38
    assert_same(cast_forward(x, cast), cast_forward(x, usual))


def test_of_several_candidates_the_best_one_counts():
    """Also of powers of two, where four over six has two e4m3 values."""
    factors = tuple(2.0**-i for i in range(4))
    Rule(name="best", candidates=factors).register()
    x = normal(6, 64)
    x[:3, 0] = 100.0
    for i, factor in enumerate(factors):
        Rule(name=f"by_{i}", candidates=(factor,)).register()
    for scaling, width in (("row", 64), ("mx", 32)):
        least, *errors = (
            cast_forward(x, Cast(format="e2m1", scaling=scaling, rule=rule))
            .sub(x)
            .square()
            .unflatten(1, (-1, width))
            .sum(-1)
            for rule in ("best", *(f"by_{i}" for i in range(4)))
        )
        assert_close(least, torch.stack(errors).amin(0))


PRODUCTS = {
    "linear": (nn.functional.linear, (6, 40), (16, 40)),
    "batch": (torch.matmul, (3, 6, 40), (3, 40, 5)),
    "convolution": (nn.functional.conv2d, (2, 8, 5, 5), (4, 8, 3, 3)),
}


def three(function, *operands):
    operands = [x.clone().requires_grad_() for x in operands]
    y = function(*operands)
    return [y.detach(), *torch.autograd.grad(y, operands, normal(*y.shape, seed=3))]


@sampled(2)
@parametrize(
    "name, scaling, product",
    [
        *((name, "tensor", "linear") for name in MAGNITUDES),
        *(("smooth", "tensor", product) for product in PRODUCTS if product != "linear"),
        *(("rms", scaling, "batch") for scaling in ("row", "mx", "nv")),
    ],
)
def test_products_compiled_and_not(name, scaling, product):
    """One graph, whose results are those of eager code up to the order of sums; also of sizes that
    change."""
    registered(MAGNITUDES[name], "e4m3" if scaling == "nv" else "power")
    format = "e2m1" if scaling == "nv" else "e4m3"
    recipe = recipe_of(Cast(format=format, scaling=scaling, rule="mine"))
    function, *shapes = PRODUCTS[product]

    def cast(*operands):
        with fp8.autocast(recipe):
            return function(*operands)

    graph = in_one_graph(cast)
    for size in (0, 2):
        first, *others = shapes[0]
        first += 0 if product == "batch" else size
        operands = normal(first, *others), normal(*shapes[1])
        found, expected = three(graph, *operands), three(cast, *operands)
        assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert not torch.equal(cast(*operands), function(*operands))


# Names: files and checkpoints


def test_a_registered_recipe_is_a_name_everywhere():
    registered(rms)
    recipe = recipe_of(Cast(format="e4m3", scaling="row", rule="mine")).register()
    assert recipe.register() is recipe is RECIPES["own"]
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    policy = Policy("own", first=1)
    assert Policy.from_json(policy.to_json()) == policy == Policy(recipe, first=1)
    assert '"own"' in policy.to_json()
    model = fp8.convert(linears(32, 16), "own")
    x = normal(4, 32)
    with fp8.autocast("own"):
        y = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert_same(y, model(x))
    with refuses("recipe 'own' is registered already"):
        recipe_of(Cast(format="e4m3"), "own").register()
    with refuses("'auto' is registered already"):
        recipe_of(Cast(format="e4m3"), "auto").register()


def test_what_is_stored_has_the_name_of_the_rule_and_asks_for_it():
    """In a dict, JSON, a pickle, a copy and a whole model."""
    rule = registered(rms)
    cast = Cast(format="e4m3", scaling="mx", rule="mine")
    recipe = recipe_of(cast)
    file = io.BytesIO()
    model = fp8.convert(nn.Linear(32, 16), recipe)
    torch.save(model, file)
    stored, values = pickle.dumps(cast), json.dumps(recipe.to_dict())
    assert pickle.loads(stored) == copy.deepcopy(cast) == cast
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_same(loaded(normal(4, 32)), model(normal(4, 32)))
    for table in (RULES, LOWERED):
        del table["mine"]
    asks = r"'mine'.*fp8\.Rule\(name='mine', \.\.\.\)\.register\(\)"
    file.seek(0)
    for read in (
        lambda: pickle.loads(stored),
        lambda: Recipe.from_dict(json.loads(values)),
        lambda: torch.load(file, weights_only=False),
        lambda: LOWERED["mine"],
    ):
        with refuses(asks):
            read()
    with refuses(r"fp8\.Recipe\(name='theirs', \.\.\.\)\.register\(\)"):
        Policy.from_json(Policy("row").to_json().replace("row", "theirs"))
    rule.register()
    assert pickle.loads(stored) == cast


# What is refused


@parametrize(
    "fields, error, message",
    [
        ({"name": 3}, TypeError, "must be a name, not 3"),
        ({"name": "two words"}, ValueError, "an identifier, got 'two words'"),
        ({"magnitude": 3}, TypeError, "Rule.magnitude must be a function, not 3"),
        ({"scale": "up"}, TypeError, "Rule.scale must be a function, not 'up'"),
        (
            {"stored": "bf16"},
            ValueError,
            "unknown stored 'bf16'; choose one of 'power'",
        ),
        ({"stored": "e4m3"}, ValueError, "has a unit, others none; got None"),
        ({"unit": 448.0}, ValueError, "has a unit, others none; got 448"),
        ({"candidates": ()}, ValueError, "candidates is empty"),
        ({"candidates": (1.0, -1.0)}, ValueError, "must be positive, got -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rule_that_cannot_be_is_refused_at_birth(fields, error, message):
    with refuses(message, error):
        Rule(**{"name": "mine"} | fields)


@parametrize(
    "fields, message",
    [
        (
            {"magnitude": lambda x, _: x.abs().amax(PLACES)},
            r"a shape of .*, got \(2,\)",
        ),
        ({"magnitude": lambda x, _: x.abs()}, r"got \(2, 3, 32\)"),
        ({"magnitude": lambda x, _: 3.0}, "got float"),
        (
            {"magnitude": lambda x, _: x.double().abs().amax(PLACES, True)},
            "got torch.float64",
        ),
        (
            {"magnitude": lambda x, _: x.sum(PLACES, True) - 1e4},
            "positive and finite, got -",
        ),
        ({"scale": exact}, 'no powers of two, got .*; take stored="float32"'),
        (
            {"scale": lambda amax, _: amax.flatten().exp2()},
            r"Rule.scale .* got \(2, 1, 2\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_functions_are_tried_when_a_rule_is_registered(fields, message):
    with refuses(message):
        Rule(name="mine", **fields).register()
    assert "mine" not in RULES


def test_a_name_has_one_rule():
    rule = registered(rms)
    assert rule.register() is rule
    taken = dataclasses.replace(rule, magnitude=smooth), Rule(name="up", scale=exact)
    for other in taken:
        with refuses(f"rule '{other.name}' is registered already"):
            other.register()


@parametrize("axis", [-1, -2])
@parametrize("scaling", ["row", "block", "mx"])
def test_a_rule_may_not_give_each_element_a_scale(scaling, axis):
    registered(smooth)
    cast = Cast(format="e4m3", scaling=scaling, rule="mine")
    with refuses(r"in a tile of one row is each element; take a larger"):
        cast_forward(normal(4, 64), cast, axis)


def test_what_has_no_values_of_a_tile_refuses_such_a_rule(recwarn):
    registered(rms)
    with refuses("scaling 'delayed' has no rule 'mine'"):
        Cast(format="e4m3", scaling="delayed", rule="mine")
    recipe = recipe_of(Cast(format="e4m3", scaling="tensor", rule="mine"))
    with refuses("takes rules of the largest magnitude, not mine"):
        dataclasses.replace(recipe, accumulate="hopper")
    model = nn.Linear(32, 16)
    with refuses("rule 'mine' reads values"):
        gather_in_fp8(model, recipe)
    with refuses("no layout for recipe 'own'"):
        fp8.export(fp8.convert(linears(32, 16), recipe), "out")
