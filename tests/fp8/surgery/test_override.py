"""Recipes of layers, products and operands that are switched at run time, and back."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8
from fp8.recipes.policy import CONCERNS
from tests.fp8.compare import outcome


def model_and_input(recipe="tensor"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return fp8.convert(model, recipe), torch.randn(8, 16)


def step(model, x):
    return outcome(lambda: model(x), model.parameters())


def equal(a, b):
    return [torch.equal(p, q) for p, q in zip(a, b, strict=True)]


@pytest.mark.proves("the field", "single products in high precision, at run time", how="own")
@pytest.mark.parametrize("concern", [None, *CONCERNS])
def test_is_the_policy_with_these_rules_and_back(concern):
    """Every product, operand and cast: in the block as converted under that policy."""
    model, x = model_and_input("mxfp8")
    before = step(model, x)
    rule = ("2", concern, None)
    other = fp8.convert(copy.deepcopy(model), fp8.Policy("mxfp8", rules=[rule]))
    expected = step(other, x)
    with fp8.override(model, rule):
        assert all(equal(step(model, x), expected))
        assert "override" in str(fp8.report(model))
        y = model(x)
    late = torch.autograd.grad(y.square().sum(), model.parameters())
    assert all(equal((y, *late), expected))
    assert not all(equal(before, expected))
    assert all(equal(step(model, x), before))
    assert "override" not in str(fp8.report(model))


def test_blocks_nest_and_rules_apply_in_order():
    model, _ = model_and_input()
    outer = fp8.override(model, ("*", None, None), ("2", "forward", "mxfp8"))
    with outer:
        assert model[0].fp8_recipe.name == "high precision"
        assert model[2].fp8_recipe.input == fp8.RECIPES["mxfp8"].input
        with fp8.override(model, ("0", None, "row")), outer:
            assert model[0].fp8_recipe.name == "high precision"
        assert model[0].fp8_recipe.name == "high precision"
    assert [model[i].fp8_recipe.name for i in (0, 2)] == ["tensor"] * 2


@pytest.mark.parametrize("recipe", ["delayed", "static"])
def test_histories_stay(recipe):
    model, x = model_and_input(recipe)
    step(model, x)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for other in (None, "tensor"):
        with fp8.override(model, ("*", None, other)):
            step(model, 100 * x)
    with fp8.override(model, ("0", None, "delayed")):
        pass
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())


def test_compiled():
    torch.compiler.reset()
    model, x = model_and_input("unit")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled(x)
    with fp8.override(model, ("*", None, None)):
        assert torch.equal(compiled(x), model(x))
        assert not torch.equal(compiled(x), before)
    assert torch.equal(compiled(x), before)


def test_bad_input():
    model, _ = model_and_input()
    with pytest.raises(ValueError, match=r"'3' matches no converted layer; there are '0', '2'"):
        fp8.override(model, ("3", None, None))
    with pytest.raises(ValueError, match="needs a rule"):
        fp8.override(model)
    with pytest.raises(ValueError, match="unknown product"):
        fp8.override(model, ("*", "dgrad", None))
    with pytest.raises(TypeError, match="a rule is"):
        fp8.override(model, "*")
    with pytest.raises(TypeError, match=r"needs an nn\.Module"):
        fp8.override("model", ("*", None, None))


@pytest.mark.parametrize(
    "rule", [("0", None, "mxfp8"), ("0", "grad_weight", None), ("*", None, None)]
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_on_one_side_of_the_block(rule, reentrant):
    """What is recomputed on the other side is not what the forward pass computed. A reentrant
    checkpoint is refused inside of the block."""
    torch.manual_seed(0)
    model = fp8.convert(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), "tensor")
    x = torch.randn(8, 32, requires_grad=True)

    def run() -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant).square().sum()

    def gradients(loss: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss.backward()
        return [p.grad for p in model.parameters()]

    refused = pytest.raises(RuntimeError, match=r"fp8\.override")
    with fp8.override(model, rule):
        expected = gradients(model(x).square().sum())
        if reentrant:
            with refused:
                run()
        else:
            assert all(map(torch.equal, gradients(run()), expected))
            with torch.no_grad():
                run()
            inside = run()
    if not reentrant:
        with refused:
            inside.backward()
    outside = run()
    with fp8.override(model, rule), refused:
        outside.backward()
    plain = gradients(model(x).square().sum())
    assert all(map(torch.equal, gradients(run()), plain))
