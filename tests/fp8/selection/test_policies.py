"""Policies on models: which layer gets which recipe, what `fp8.report` says, and the switch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8 import RECIPES, Policy, Rule
from fp8.recipes.policy import ROLES
from fp8.selection.layers import candidates
from fp8.selection.policies import resolve
from fp8.selection.roles import roles, with_role
from tests.fp8.selection.test_where import PATTERNS, experts, llama, mlp, nanogpt

BLOCKS, WIDTH = 4, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """A patch projection, blocks and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(16, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def names(policy: Policy, model: nn.Module) -> dict[str, str | None]:
    """Layer -> the name of its recipe."""
    return {n: d.recipe.name if d.recipe else None for n, d in resolve(policy, model).items()}


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    return {"output": y.detach(), "input": x.grad} | {
        n: p.grad.clone() for n, p in model.named_parameters()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.proves("the field", "precision by layer", how="own")
def test_later_rules_override_earlier_ones_and_exceptions_override_all():
    rules = [("blocks.*", None, "row"), ("*.down", None, "tensor"), ("blocks.2.down", None, None)]
    policy = Policy("mxfp8", rules=rules, first=1, last=1, keep=["readout"])
    found = names(policy, net())
    assert found == {
        "patch": "mxfp8",
        **dict.fromkeys(["blocks.0.up", "blocks.0.down", "blocks.3.up", "blocks.3.down"]),
        "blocks.1.up": "row",
        "blocks.1.down": "tensor",
        "blocks.2.up": "row",
        "blocks.2.down": None,
        "head": None,
    }
    assert list(found) == list(candidates(net()))


def test_the_report_names_the_rule_that_decided():
    policy = Policy("mxfp8", rules=[("*.up", "grad_weight", "row"), ("*.1.*", None, None)], first=1)
    model = fp8.convert(net(), policy, backend="simulate")
    rows = {row.path: (row.done, row.why) for row in fp8.report(model)}
    assert rows["blocks.0.up"] == ("left alone", "first=1: in blocks.0")
    assert rows["blocks.1.up"] == ("left alone", "rule 2: '*.1.*'")
    mixed = "mxfp8 (grad_weight: row)"
    assert rows["blocks.2.up"] == ("converted", f"{mixed} (rule 1: '*.up' grad_weight)")
    assert rows["head"] == ("converted", "mxfp8")
    kept = fp8.convert(net(), Policy(None, rules=[("head", None, "row")]))
    assert {row.why for row in fp8.report(kept).left_alone} == {"the recipe of the policy is None"}


@pytest.mark.parametrize("product", ["forward", "grad_input", "grad_weight"])
def test_each_product_of_a_composed_recipe_is_that_of_the_recipe_it_comes_from(product: str):
    """Output, input gradient and weight gradient of one layer, bit by bit."""
    torch.manual_seed(0)
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
        assert torch.equal(results["mixed"][key], results[source][key])
        assert not torch.equal(results["mixed"][key], results[other][key])


@pytest.mark.parametrize("make", [Policy.hidden, Policy.umup])
def test_others_take_their_recipe_whatever_the_switch(make):
    policy = make("row", others="bf16")
    assert Policy.from_json(policy.to_json()) == policy
    model = fp8.convert(net(), replace(policy, switch=[(0.5, "mxfp8"), (0.9, None)]))
    for fraction, recipe in [(0, "row"), (0.5, "mxfp8"), (0.9, "high precision"), (0.1, "row")]:
        fp8.advance(model, fraction)
        expected = {n: recipe if ".up" in n else "bf16" for n in candidates(model)}
        if make is Policy.hidden:
            expected |= {n: recipe for n in expected if ".down" in n}
        assert {n: model.get_submodule(n).fp8_recipe.name for n in expected} == expected


def test_roles():
    assert roles(net(), candidates(net())) == {
        "patch": "embedding",
        **{f"blocks.{i}.{part}": "hidden" for i in range(BLOCKS) for part in ("up", "down")},
        "head": "readout",
    }
    for make, (outside, _) in PATTERNS.items():
        model = make()
        found = roles(model, candidates(model))
        assert [n for n, r in found.items() if r == "readout"] or not outside, make
    model = experts()
    assert with_role("router", model, candidates(model)).keys() == {"blocks.0.router"}
    model = llama()
    attention = with_role("attention", model, candidates(model))
    assert attention.keys() == {n for n in candidates(model) if ".self_attn." in n}


def test_a_head_with_as_many_classes_as_there_are_blocks_is_no_router():
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block() for _ in range(5)])})
    model["head"] = nn.Linear(WIDTH, 5)
    assert roles(model, candidates(model))["head"] == "readout"


def test_stacked_experts_have_a_router():
    block = nn.Module()
    block.router = nn.Linear(WIDTH, 8)
    block.stack = nn.Module()
    block.stack.weight = nn.Parameter(torch.zeros(8, WIDTH, 16))
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    assert with_role("router", model, candidates(model)).keys() == {"blocks.0.router"}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_found_or_refused_by_name(role: str):
    model = nn.Sequential(nn.Flatten(), mlp())
    if role in ("readout", "embedding", "norm"):
        with_role(role, model, candidates(model))
    else:
        with pytest.raises(ValueError, match=f"role '{role}' is not found in this Sequential"):
            resolve(Policy(keep=[role]), model)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(rules=[Rule("haed")]), r"rule 1: 'haed' matches no layer; did you mean 'head'\?"),
        (Policy(rules=[("head", None, None), ("x*", None, "row")]), "rule 2: 'x*' matches no"),
        (Policy(rules=[Rule("blocks")]), r'inside of that module, use "blocks\.\*"'),
        (Policy(first=3, last=2), "first=3 and last=2 need .* Net has 4"),
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
    with pytest.raises(ValueError, match=message.replace("'x*'", r"'x\*'")):
        fp8.convert(model, policy)
    assert str(fp8.report(model)) == before


def test_first_and_last_may_name_all_blocks():
    found = names(Policy("row", first=3, last=1), net())
    assert [name for name, recipe in found.items() if recipe] == ["patch", "head"]
    with pytest.raises(ValueError, match="Sequential has 0"):
        resolve(Policy(first=1), mlp())


def test_rules_for_layers_that_are_never_cast():
    model = nanogpt()
    resolve(Policy("row", rules=[Rule("tokens")]), model)  # in high precision, as asked
    with pytest.raises(ValueError, match=r"stay: 'tokens' \(a lookup, not a product\)"):
        resolve(Policy(rules=[Rule("tokens", "row")]), model)


def test_names_inside_of_wrappers():
    model = net()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    found = names(Policy("row", rules=[("blocks.1.up", None, None)]), model)
    assert found["blocks.1._orig_mod.up"] is None


# Conversion


def test_a_policy_without_rules_is_its_recipe():
    for recipe in ("auto", "mxfp8", "delayed"):
        one, other = fp8.convert(net(), recipe), fp8.convert(net(), Policy(recipe))
        assert fp8.report(one).rows == fp8.report(other).rows
        assert same(gradients(one, X), gradients(other, X))


def test_autocast_equals_conversion():
    policy = Policy("row", rules=[("*.up", "grad_weight", None), ("patch", None, "mxfp8")], last=1)
    converted = fp8.convert(net(), policy)
    model = net()
    with fp8.autocast(policy, model=model):
        inside = gradients(model, X)
    assert same(inside, gradients(converted, X))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not same(gradients(model, X), inside)


def test_autocast_as_a_decorator_and_in_a_checkpoint():
    policy, model = Policy("row", first=2, keep=["readout"]), net()
    wanted = gradients(fp8.convert(net(), policy), X)
    block = fp8.autocast(policy, model=model)
    assert same(gradients_by(block(model.forward), model), wanted)

    def recomputed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            model, x, use_reentrant=False, context_fn=fp8.checkpoint_contexts
        )

    with block:
        checkpointed = gradients_by(recomputed, model)
    assert same(checkpointed, wanted)


def gradients_by(call: Callable[[Tensor], Tensor], model: nn.Module) -> dict[str, Tensor]:
    wrapped = nn.Module()
    wrapped.forward = call
    wrapped.zero_grad, wrapped.named_parameters = model.zero_grad, model.named_parameters
    return gradients(wrapped, X)


def test_autocast_of_a_layer_that_raises_leaves_no_block_open():
    model = nn.Sequential(nn.Linear(16, 16))
    plain = X @ X.mT
    with fp8.autocast("row"):
        cast = X @ X.mT
    with fp8.autocast(Policy("row", rules=[Rule("0")]), model=model):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3))
        assert torch.equal(X @ X.mT, cast)
        assert not torch.equal(cast, plain)
    assert torch.equal(X @ X.mT, plain)


def test_autocast_needs_a_model_and_no_switch():
    x = torch.randn(4, 32)
    with fp8.autocast(Policy("row")):
        one = x @ x.mT
    with fp8.autocast("row"):
        assert torch.equal(one, x @ x.mT)
    with fp8.autocast(Policy(None)):
        assert torch.equal(x @ x.mT, torch.mm(x, x.mT))
    with pytest.raises(ValueError, match=r"needs their names: fp8.autocast\(policy, model=model\)"):
        fp8.autocast(Policy("row", rules=[Rule("head")]))
    with pytest.raises(ValueError, match=r"pass policy.at\(fraction\)"):
        fp8.autocast(Policy("row", switch=[(0.9, "bf16")]), model=net())
    with pytest.raises(ValueError, match="recipe 'delayed' keeps scales"):
        fp8.autocast(Policy("row", rules=[("head", None, "delayed")]), model=net())


def test_autocast_by_layer_is_not_compiled():
    model, policy = net(), Policy("row", first=1)

    def step(x: Tensor) -> Tensor:
        with fp8.autocast(policy, model=model):
            return model(x)

    with pytest.raises(Exception, match="cannot be compiled"):
        torch.compile(step, backend="eager", fullgraph=True)(X)


def test_levels_take_a_policy():
    model = net()
    fp8.initialize(model, None, "O2", Policy("row", keep=["readout"]))
    assert {r.path for r in fp8.report(model).left_alone} == {"head"}
    with pytest.raises(ValueError, match="matches no layer"):
        fp8.initialize(net(), None, "O2", Policy("row", rules=[Rule("haed")]))


def test_calibration_and_unit_scaling_choose_again_under_auto():
    from unit_scaling.transforms import unit_scale

    model = fp8.convert(net(), Policy(rules=[("patch", "forward", None), ("head", None, "row")]))
    assert model.head.fp8_recipe.name == "row"
    unit_scale(model)  # a copy
    scaled = fp8.convert(unit_scale(net()), Policy(rules=[("patch", "grad_weight", None)]))
    assert scaled.blocks[0].up.fp8_recipe == RECIPES["unit"]
    assert scaled.patch.fp8_recipe.forward == RECIPES["unit"].forward
    assert scaled.patch.fp8_recipe.grad_weight == (None, None)
    later = unit_scale(fp8.convert(net(), Policy(rules=[("patch", "grad_weight", None)])))
    assert later.patch.fp8_recipe == scaled.patch.fp8_recipe


# The switch


@pytest.mark.proves("the field", "late switch of precision", how="own")
def test_the_switch_equals_a_model_converted_anew():
    rules = [("*.up", "grad_weight", None), ("head", None, "tensor")]
    policy = Policy("row", rules=rules, first=1, switch=[(0.5, "mxfp8"), (0.9, None)])
    model = fp8.convert(net(), policy)
    for fraction, changed in [(0, 0), (0.4, 0), (0.5, 1), (0.6, 0), (0.95, 1), (0.5, 1), (0, 1)]:
        assert fp8.advance(model, fraction) == changed
        anew = net() if fraction > 0.9 else fp8.convert(net(), policy.at(fraction))
        assert same(gradients(model, X), gradients(anew, X)), fraction
    fp8.advance(model, 0.5)
    rows = {row.path: row.why for row in fp8.report(model)}
    assert rows["blocks.0.up"].startswith("first=1")
    assert "since 0.5 of the training" in rows["head"]
    assert rows["head"].startswith("mxfp8")


def test_the_switch_keeps_buffers_and_weights():
    model = fp8.convert(net(), Policy("delayed", switch=[(0.5, "bf16"), (0.8, "delayed")]))
    gradients(model, X)
    weights = [id(p) for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    fp8.advance(model, 0.6)
    gradients(model, X)
    fp8.advance(model, 0.9)
    assert [id(p) for p in model.parameters()] == weights
    now = model.state_dict()
    assert now.keys() == state.keys()
    assert all(torch.equal(now[k], state[k]) for k in state)
    assert any("fp8_amax" in key for key in state)


def test_copies_and_pickles_keep_the_policy():
    model = fp8.convert(net(), Policy("row", switch=[(0.5, "bf16")]))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fp8.advance(other, 0.7)
        assert other.head.fp8_recipe.name == "bf16"
    assert model.head.fp8_recipe.name == "row"
    fp8.revert(model)
    assert not any(key.startswith("fp8_") for m in model.modules() for key in vars(m))


def test_the_switch_of_a_compiled_model():
    policy = Policy("row", first=1, switch=[(0.5, "bf16")])
    make, x = lambda: net().blocks[:2], torch.randn(4, WIDTH)
    model = fp8.convert(make(), policy, backend="simulate")
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for fraction in (0.1, 0.7):
        fp8.advance(compiled, fraction)
        eager = fp8.convert(make(), policy.at(fraction), backend="simulate")
        torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
    assert len(frames) == 2


def test_advance_without_a_switch_is_refused():
    with pytest.raises(ValueError, match="policy that has a switch"):
        fp8.advance(fp8.convert(net(), Policy("row", first=1)), 0.5)
    model = fp8.convert(net(), Policy("row", switch=[(0.5, "bf16")]))
    with pytest.raises(ValueError, match="a number from 0 to 1, got 2"):
        fp8.advance(model, 2)
    with pytest.raises(TypeError, match=r"advance needs an nn\.Module"):
        fp8.advance([], 0.5)


def test_the_report_states_name_and_switch():
    policy = Policy("row", name="mine", switch=[(0.5, "bf16"), (0.9, None)])
    notes = fp8.report(fp8.convert(net(), policy)).notes
    assert notes == [
        "policy 'mine'; bf16 from 0.5 of the training; high precision from 0.9 of the training"
    ]
    assert fp8.report(fp8.convert(net(), Policy("row", first=1))).notes == []


def test_a_switch_to_an_impossible_combination_is_refused_at_the_start():
    policy = Policy("row", rules=[("head", "grad_weight.grad", None)], switch=[(0.5, "nvfp4")])
    with pytest.raises(ValueError, match="the casts of 'head' by rule 1"):
        fp8.convert(net(), policy)


def test_routers_whose_products_are_their_own_need_no_conversion():
    """Those of transformers' mixtures of experts hold a weight, not a linear layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
    )
    model = transformers.MixtralForCausalLM(config)
    found = names(Policy("row", keep=["router"]), model)
    assert set(found.values()) == {"row"}
    assert not any(name.endswith(".gate") for name in found)


def test_names_under_data_parallel():
    model = nn.DataParallel(net())
    found = names(Policy("row", rules=[("head", None, None)], first=1), model)
    assert found["module.head"] is None
    assert found["module.blocks.0.up"] is None
    assert found["module.blocks.1.up"] == "row"
    rows = {row.path: row.done for row in fp8.report(fp8.convert(model, Policy("row", first=1)))}
    assert rows["module.blocks.0.up"] == "left alone"
