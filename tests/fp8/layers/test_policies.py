"""Policies on models: which layer gets which recipe, what `fp8.report` says, and the switch."""

import copy
from dataclasses import replace

import torch
from torch import nn

import fp8
from fp8 import Policy
from fp8.layers.policies import resolve
from fp8.layers.roles import with_role
from fp8.layers.select import candidates
from fp8.layers.settings import converted
from fp8.recipes.policy import ROLES, LayerRule
from tests.fp8.layers.test_where import mlp, nanogpt
from tests.shared import (
    Net,
    assert_same,
    by_path,
    normal,
    parametrize,
    proves,
    refuses,
)

BLOCKS, WIDTH = 4, 32


def block():
    forward = lambda m, x: x + m.down(m.up(x).relu())  # noqa: E731
    return Net(forward, up=nn.Linear(WIDTH, 64), down=nn.Linear(64, WIDTH))


def net():
    """A patch projection, blocks and a readout."""
    torch.manual_seed(0)
    forward = lambda m, x: m.head(m.blocks(m.patch(x)))  # noqa: E731
    patch, blocks = nn.Linear(16, WIDTH), [block() for _ in range(BLOCKS)]
    head = nn.Linear(WIDTH, 48)
    return Net(forward, patch=patch, blocks=nn.Sequential(*blocks), head=head)


def names(policy, model):
    """Layer -> the name of its recipe."""
    return {
        n: d.recipe.name if d.recipe else None
        for n, d in resolve(policy, model).items()
    }


def gradients(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    return {"output": y.detach(), "input": x.grad} | found


X = normal(24, 16, seed=1)


@proves("the field", "precision by layer")
def test_later_rules_override_earlier_ones_and_exceptions_override_all():
    rules = [
        ("blocks.*", None, "row"),
        ("*.down", None, "tensor"),
        ("blocks.2.down", None, None),
    ]
    policy = Policy("mxfp8", rules=rules, first=1, last=1, keep=["readout"])
    found = names(policy, net())
    assert found == {
        "patch": "mxfp8",
        **dict.fromkeys("blocks.0.up blocks.0.down blocks.3.up blocks.3.down".split()),
        "blocks.1.up": "row",
        "blocks.1.down": "tensor",
        "blocks.2.up": "row",
        "blocks.2.down": None,
        "head": None,
    }
    assert list(found) == list(candidates(net()))


def test_the_report_names_the_rule_that_decided():
    policy = Policy(
        "mxfp8", rules=[("*.up", "grad_weight", "row"), ("*.1.*", None, None)], first=1
    )
    model = fp8.convert(net(), policy, backend="simulate")
    rows = by_path(fp8.report(model), "done", "why")
    assert rows["blocks.0.up"] == ("left alone", "first=1: in blocks.0")
    assert rows["blocks.1.up"] == ("left alone", "rule 2: '*.1.*'")
    mixed = "mxfp8 (grad_weight: row)"
    assert rows["blocks.2.up"] == ("converted", f"{mixed} (rule 1: '*.up' grad_weight)")
    assert rows["head"] == ("converted", "mxfp8")
    kept = fp8.convert(net(), Policy(None, rules=[("head", None, "row")]))
    whys = {row.why for row in fp8.report(kept).left_alone}
    assert whys == {"the recipe of the policy is None"}


@parametrize("product", ["forward", "grad_input", "grad_weight"])
def test_each_product_of_a_composed_recipe_is_that_of_the_recipe_it_comes_from(product):
    """Output, input gradient and weight gradient of one layer, bit by bit."""
    layer = nn.Linear(64, 32)
    x = torch.randn(96, 64)
    results = {}
    for name, policy in {
        "mxfp4": Policy("mxfp4"),
        "row": Policy("row"),
        "mixed": Policy("mxfp4", rules=[("*", product, "row")]),
    }.items():
        model = nn.Sequential(copy.deepcopy(layer))
        results[name] = gradients(fp8.convert(model, policy, backend="simulate"), x)
    of = {"output": "forward", "input": "grad_input", "0.weight": "grad_weight"}
    for key, its_product in of.items():
        source, other = ("row", "mxfp4") if its_product == product else ("mxfp4", "row")
        assert_same(results["mixed"][key], results[source][key])
        assert not torch.equal(results["mixed"][key], results[other][key])


@parametrize("make", [Policy.hidden, Policy.umup])
def test_others_take_their_recipe_whatever_the_switch(make):
    policy = make("row", others="bf16")
    assert Policy.from_json(policy.to_json()) == policy
    model = fp8.convert(net(), replace(policy, switch=[(0.5, "mxfp8"), (0.9, None)]))
    switched = {0: "row", 0.5: "mxfp8", 0.9: "high precision", 0.1: "row"}
    for fraction, recipe in switched.items():
        fp8.advance(model, fraction)
        expected = {n: recipe if ".up" in n else "bf16" for n in candidates(model)}
        if make is Policy.hidden:
            expected |= {n: recipe for n in expected if ".down" in n}
        assert {n: model.get_submodule(n).fp8_recipe.name for n in expected} == expected


@parametrize("role", ROLES)
def test_a_role_is_found_or_refused_by_name(role):
    model = nn.Sequential(nn.Flatten(), mlp())
    if role in ("readout", "embedding"):
        with_role(role, model, candidates(model))
    else:
        with refuses(f"role '{role}' is not found in this Sequential"):
            resolve(Policy(keep=[role]), model)


@parametrize(
    "policy, message",
    [
        (
            Policy(rules=[LayerRule("haed")]),
            r"rule 1: 'haed' matches no layer; did you mean 'head'\?",
        ),
        (
            Policy(rules=[("head", None, None), ("x*", None, "row")]),
            "rule 2: 'x*' matches no",
        ),
        (
            Policy(rules=[LayerRule("blocks")]),
            r'inside of that module, use "blocks\.\*"',
        ),
        (Policy(first=3, last=2), "first=3 and last=2 need 5 .* Net has 4"),
        (Policy(first=0.6, last=0.3), "first=0.6 and last=0.3 need 5 .* Net has 4"),
        (
            Policy("nvfp4", rules=[("head", "grad_weight.grad", None)]),
            r"the casts of 'head' by rule 1: 'head' grad_weight.grad: .*both operands rotated",
        ),
        (
            Policy("delayed", rules=[("head", "forward.input", "row")]),
            "the casts of 'head' by rule 1.*one history, one cast",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_an_error_and_changes_nothing(policy, message):
    model = fp8.convert(net(), "row")
    before = str(fp8.report(model))
    with refuses(message.replace("'x*'", r"'x\*'")):
        fp8.convert(model, policy)
    assert str(fp8.report(model)) == before


def test_rules_for_layers_that_are_never_cast():
    model = nanogpt()
    # In high precision, as asked.
    resolve(Policy("row", rules=[LayerRule("tokens")]), model)
    with refuses(r"stay: 'tokens' \(a lookup, not a product\)"):
        resolve(Policy(rules=[LayerRule("tokens", "row")]), model)


# Conversion


def test_autocast_takes_a_policy_that_selects_no_layers():
    x = torch.randn(4, 32)
    with fp8.autocast("row"):
        expected = x @ x.mT
    with fp8.autocast(Policy("row")):
        assert_same(x @ x.mT, expected)
    with fp8.autocast(Policy(None)):
        assert_same(x @ x.mT, torch.mm(x, x.mT))
    with refuses(r"selects layers .* is for fp8.convert\(model, policy\)"):
        fp8.autocast(Policy("row", rules=[LayerRule("head")]))
    with refuses(r"pass policy.at\(fraction\)"):
        fp8.autocast(Policy("row", switch=[(0.9, "bf16")]))
    with refuses("recipe 'delayed' keeps scales"):
        fp8.autocast(Policy("delayed"))


# The switch


@parametrize("wrap, name", [(nn.DataParallel, "module"), (nn.Sequential, "0")])
def test_names_inside_of_wrappers(wrap, name):
    found = names(Policy("row", keep=["readout"], first=1), wrap(net()))
    recipes = {"head": None, "blocks.0.up": None, "blocks.1.up": "row"}
    for part, recipe in recipes.items():
        assert found[f"{name}.{part}"] == recipe


def test_the_report_states_name_and_switch_and_advance_needs_one():
    policy = Policy("row", name="mine", switch=[(0.5, "bf16"), (0.9, None)])
    model = fp8.convert(net(), policy)
    assert fp8.report(model).notes == [
        "policy 'mine'; bf16 from 0.5 of the training; high precision from 0.9 of the training"
    ]
    with refuses("a number from 0 to 1, got 2"):
        fp8.advance(model, 2)
    fp8.convert(model, Policy("row", first=1))
    assert fp8.report(model).notes == []
    with refuses("policy that has a switch"):
        fp8.advance(model, 0.5)
    with refuses(r"advance needs an nn\.Module", TypeError):
        fp8.advance([], 0.5)


def test_a_switch_to_an_impossible_combination_is_refused_at_the_start():
    policy = Policy(
        "row", rules=[("head", "grad_weight.grad", None)], switch=[(0.5, "nvfp4")]
    )
    with refuses("the casts of 'head' by rule 1"):
        fp8.convert(net(), policy)


def test_a_share_of_a_model_without_blocks_is_refused():
    with refuses("last=0.15 need 1 repeated blocks, and the Linear has 0"):
        fp8.convert(nn.Linear(4, 4), Policy(last=0.15))


LATE = Policy("row", rules=[("*.up", "forward", None), ("head", None, None)], last=0.3)
LEFT = Policy(None, rules=[("blocks.1.*", None, "mxfp8")])
SWITCHES = {
    "forward in high precision": Policy("row", first=1, switch=[(0.5, LATE)]),
    "a recipe after a policy": Policy("row", switch=[(0.5, LATE), (0.9, "mxfp8")]),
    "layers that were not converted": Policy(
        None, rules=[("head", None, "row")], switch=[(0.5, LATE), (0.9, LEFT)]
    ),
    "others": Policy(
        "row", last=1, others="bf16", switch=[(0.5, Policy("row", first=0.5))]
    ),
    "static": Policy("tensor", switch=[(0.5, Policy("static", last=0.25))]),
}


def casts_of(recipe):
    return recipe.casts if recipe else (None,) * 6


@proves("the field", "late switch of precision")
@parametrize("policy", SWITCHES.values(), ids=SWITCHES)
@parametrize("fractions", [(0, 0.5, 0.95, 0.6, 0), (0.95,)])
def test_a_switch_to_a_policy_equals_a_model_converted_anew(policy, fractions):
    model = fp8.convert(net(), policy, backend="simulate")
    for fraction in fractions:
        fp8.advance(model, fraction)
        in_force = policy.at(fraction)
        anew = fp8.convert(net(), in_force, backend="simulate")
        assert_same(gradients(model, X), gradients(anew, X))
        decisions = resolve(in_force, net())
        whys = by_path(fp8.report(model), "why")
        for name, layer in converted(model).items():
            assert decisions[name].why in whys[name]
            assert casts_of(layer.fp8_recipe) == casts_of(decisions[name].recipe)
        assert not fp8.advance(model, fraction)


@parametrize("policy", SWITCHES.values(), ids=SWITCHES)
@parametrize("advance_first", [False, True])
def test_a_run_resumes_after_a_switch_to_a_policy(policy, advance_first):
    """Whether the state_dict is loaded before or after `fp8.advance`."""
    model = fp8.convert(net(), policy, backend="simulate")
    assert fp8.advance(model, 0.6)
    gradients(model, X)
    again = fp8.convert(net(), policy, backend="simulate")
    if advance_first:
        fp8.advance(again, 0.6)
    again.load_state_dict(model.state_dict())
    fp8.advance(again, 0.6)
    assert_same(gradients(again, X), gradients(model, X))
    before = fp8.convert(net(), policy, backend="simulate")
    again.load_state_dict(before.state_dict())
    fp8.advance(again, 0)
    assert_same(gradients(again, X), gradients(before, X))


def test_the_forward_product_late_in_high_precision():
    """ "nvfp4_forward_hp" is a rule of "nvfp4" that runs natively where that does."""
    by_rule = names_of_casts(Policy("nvfp4", rules=[("*", "forward", None)]))
    assert names_of_casts("nvfp4_forward_hp") == by_rule
    policy = Policy("nvfp4", switch=[(0.8, "nvfp4_forward_hp")])
    model = fp8.convert(nn.Sequential(nn.Linear(64, 32)), policy)
    for fraction in (0, 0.8):
        fp8.advance(model, fraction)
        assert "native on CUDA devices" in fp8.report(model)[0].why


def names_of_casts(policy):
    return fp8.convert(nn.Sequential(nn.Linear(64, 32)), policy)[0].fp8_recipe.casts
