"""`fp8.Policy` as data: validation, JSON, and recipes composed of single casts."""

import itertools
import json
import re
from dataclasses import FrozenInstanceError, replace

import pytest

from fp8 import RECIPES, Cast, Policy, Recipe
from fp8.recipes.policy import (
    CASTS,
    CONCERNS,
    LayerRule,
    as_policy,
    blocks_in,
    composed,
)
from tests.shared import pairs, parametrize, refuses

OWN = Recipe(name="own", input=Cast(format="e4m3", scaling="row"))
POLICIES = {
    "default": Policy(),
    "high precision": Policy(None, rules=[("*.mlp.*", None, "mxfp8")]),
    "all": Policy(
        "mxfp8",
        rules=[
            LayerRule("*.mlp.*", "row", "grad_weight"),
            ("lm_head", "forward.input", None),
        ],
        first=2,
        last=1,
        keep=["router", "readout"],
        others="bf16",
        switch=[(0.5, "row"), (0.9, None)],
        name="mine",
    ),
    "late": Policy(
        "nvfp4",
        last=0.15,
        switch=[
            (0.5, Policy("nvfp4", rules=[("*", "forward", None)], first=0.1)),
            (0.8, "mxfp8"),
            (0.9, Policy(OWN, name="end")),
        ],
    ),
    "own recipes": Policy(
        OWN, rules=[("a", None, OWN), ("b", "grad", OWN)], others=OWN, switch=[(1, OWN)]
    ),
}
each_policy = parametrize("policy", POLICIES.values(), ids=POLICIES)


@each_policy
def test_json_gives_the_same_policy_back(policy, tmp_path):
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    path = tmp_path / "policy.json"
    assert Policy.from_json(policy.to_json(path)) == policy
    assert Policy.from_json(path) == Policy.from_json(str(path)) == policy


def test_recipes_of_the_table_are_stored_by_name():
    assert Policy(RECIPES["mxfp8"]) == Policy("mxfp8")
    assert Policy("mxfp8").to_dict()["recipe"] == "mxfp8"
    assert Policy(OWN).to_dict()["recipe"] == OWN.to_dict()
    with pytest.raises(FrozenInstanceError):
        Policy().first = 1


@parametrize(
    "values, message",
    [
        ({"frist": 1}, "'frist'.*did you mean 'first'"),
        ({"recipe": "mxpf8"}, "'mxpf8'.*did you mean 'mxfp8'"),
        ({"rules": [{"recipe": "row"}]}, "needs the keys"),
        ({"rules": [{"layers": "a", "operand": "x"}]}, "key of a rule"),
        (
            {"rules": [{"layers": "a", "product": "wgrad"}]},
            "unknown product of a rule 'wgrad'",
        ),
        ({"rules": [{"layers": ""}]}, "empty"),
        ({"first": -1}, "first"),
        ({"keep": ["head"]}, "unknown role .*'head'"),
        ({"switch": [{"from": 2, "recipe": "bf16"}]}, "0 to 1"),
        ({"switch": [{"from": 0.5}]}, "needs the keys"),
        ({"switch": [{"from": 0.5, "policy": {}}]}, "needs the keys 'recipe'"),
        ({"switch": [{"from": 0.5, "policy": {}, "recipe": "row"}]}, "'recipe'"),
    ],
)
def test_bad_json_is_refused_by_name(values, message):
    with refuses(message):
        Policy.from_dict({"recipe": "row"} | values)
    with refuses("needs the keys 'recipe'"):
        Policy.from_dict({"first": 1})


@parametrize(
    "make, error, message",
    [
        (lambda: Policy(rules="*"), TypeError, "rules must be a list"),
        (
            lambda: Policy(rules=[("*", None)]),
            TypeError,
            "a tuple (layers, product, recipe)",
        ),
        (lambda: Policy(keep="readout"), TypeError, "keep must be a list"),
        (lambda: Policy(first=1.5), ValueError, "(a float), got 1.5"),
        (lambda: Policy(last=1.0), ValueError, "last must be a number of blocks"),
        (lambda: Policy(last=float("nan")), ValueError, "(a float), got nan"),
        (lambda: Policy(first=True), TypeError, "first must be a whole number"),
        (
            lambda: Policy(switch=[(0.5, POLICIES["all"])]),
            ValueError,
            "the policy from 0.5 in Policy.switch has a switch of its own",
        ),
        (lambda: Policy(switch=[0.9]), TypeError, "(fraction, recipe)"),
        (lambda: Policy(switch=[("x", "row")]), TypeError, "a number from 0 to 1"),
        (
            lambda: Policy(switch=[(0.9, "row"), (0.5, "row")]),
            ValueError,
            "must ascend",
        ),
        (lambda: Policy(name=3), TypeError, "name must be a string"),
        (lambda: Policy(3), TypeError, "a recipe must be"),
        (lambda: LayerRule(3), TypeError, "a pattern of names"),
        (lambda: Policy().at(1.5), ValueError, "fraction must be a number from 0 to 1"),
        (lambda: Policy().at(True), TypeError, "fraction must be a number from 0 to 1"),
        (lambda: as_policy(3), TypeError, "a recipe must be"),
        (lambda: Policy.from_dict([]), TypeError, "read from a dict"),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with refuses(re.escape(message), error):
        make()


def test_what_a_rule_concerns():
    of = {name: LayerRule("*", product=name).casts for name in CONCERNS}
    every = {name: {CASTS[i] for i in indices} for name, indices in of.items()}
    assert set().union(*every.values()) == set(CASTS)
    assert len(CASTS) == 6
    assert every["forward"] == {"forward.input", "forward.weight"}
    assert every["grad"] == {"grad_input.grad", "grad_weight.grad"}
    assert all(every[name] == {name} for name in CASTS)
    assert len(LayerRule("*").casts) == 6


def test_a_switch_leaves_high_precision_alone():
    policy = POLICIES["all"]
    assert policy.at(0.2) == replace(policy, switch=())
    half = policy.at(0.5)
    assert half.recipe == "row"
    assert [rule.recipe for rule in half.rules] == ["row", None]
    end = policy.at(1)
    assert end.recipe is None
    assert [rule.recipe for rule in end.rules] == [None, None]
    assert (end.first, end.last, end.keep) == (policy.first, policy.last, policy.keep)
    assert Policy(None, switch=[(0, "row")]).at(1).recipe is None
    assert Policy("row", switch=[(0, None), (1, "tensor")]).at(1).recipe is None


def test_a_policy_in_a_switch_replaces_all_and_a_recipe_changes_what_it_casts():
    policy = POLICIES["late"]
    late, end = (to for _, to in policy.switch if isinstance(to, Policy))
    assert policy.at(0.4) == Policy("nvfp4", last=0.15)
    assert policy.at(0.5) == late
    assert policy.at(0.85) == replace(late, recipe="mxfp8")
    assert policy.at(1) == end
    again = Policy(None, switch=[(0.5, Policy("row")), (0.9, None)])
    assert [again.at(f).recipe for f in (0, 0.5, 0.9)] == [None, "row", None]


def test_a_share_of_blocks_is_rounded_up_as_published():
    """torchtitan, nvfp4.md: of 32 blocks of Llama 3 8B, 27 to 31 stay in bf16, of 36 of Qwen3 8B,
    30 to 35; against whole percents in integers."""
    assert (blocks_in(0.15, 32), blocks_in(0.15, 36)) == (5, 6)
    for percent, count in itertools.product(range(1, 100), range(200)):
        assert blocks_in(percent / 100, count) == (percent * count + 99) // 100
    assert blocks_in(3, 100) == 3


def casts(recipe):
    """The casts by name, from the properties that the products use."""
    return dict(pairs(CASTS, recipe.casts if recipe else [None] * len(CASTS)))


@parametrize("name", ["tensor_gw_hp", "nvfp4", "quartet2"])
def test_every_combination_with_high_precision_has_the_casts_that_were_asked_for(name):
    """All 64 subsets of the casts; those that a rotation refuses are refused."""
    recipe = RECIPES[name]
    for kept in itertools.product((True, False), repeat=len(CASTS)):
        sources = tuple(recipe if keep else None for keep in kept)
        asked = {
            c: casts(recipe)[c] if keep else None for c, keep in pairs(CASTS, kept)
        }
        sizes = [cast.hadamard if cast else 0 for cast in asked.values()]
        if any(a != b for a, b in pairs(sizes[::2], sizes[1::2])):
            with refuses(r"needs both operands rotated alike"):
                composed(sources, OWN)
            continue
        assert casts(composed(sources, OWN)) == asked


def test_the_casts_of_two_recipes():
    block, row = RECIPES["block"], RECIPES["row"]
    mixed = composed((row, block, row, row, "auto", row), block)
    assert mixed.forward == (row.input, block.weight)
    assert mixed.grad_input == (row.grad, row.weight)
    assert mixed.grad_weight == (block.grad, row.input)
    assert mixed.name == "row (forward.weight: block, grad_weight.grad: block)"
    assert composed(("auto",) * 6, block) is block
    named = composed((row, row, row, row, None, None), block)
    assert named.name == "row (grad_weight: high precision)"


def test_a_history_belongs_to_the_first_product():
    delayed = RECIPES["delayed"]
    first = (delayed, delayed, delayed, delayed, None, None)
    assert composed(first, OWN).grad_weight == (None, None)
    with refuses("one history, one cast"):
        composed((None, None, delayed, delayed, delayed, delayed), OWN)
