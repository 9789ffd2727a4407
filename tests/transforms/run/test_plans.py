"""Plans are data: printed, saved as JSON, loaded, and applied without a recording."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
from tests.transforms.models import GPT, Net, batch, gpt, same, step
from unit_scaling.transforms import ModelPlan, unit_scale


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the model was recorded")


def planned(**options: Any) -> tuple[nn.Module, ModelPlan]:
    model = unit_scale(gpt(), **options)
    step(model)
    return model, ModelPlan.from_json(uu.plan(model).to_json())


@pytest.mark.parametrize("options", [{}, {"init": "preserve"}])
def test_the_same_bits_without_a_recording(options, monkeypatch):
    model, plan = planned(**options)
    want, report = step(model), str(uu.report(model))
    monkeypatch.setattr("unit_scaling.transforms.run.transform.learned", refuse)
    other = unit_scale(gpt(), plan=plan)
    same(step(other), want)
    assert str(uu.report(other)) == report
    tags = [[(p.mup_type, p.mup_scaling_depth) for p in m.parameters()] for m in (other, model)]
    assert tags[0] == tags[1]
    assert uu.plan(other) == plan
    assert other.state_dict().keys() == model.state_dict().keys()


def test_a_compiled_graph_needs_no_first_call():
    model, plan = planned()
    other = unit_scale(gpt(), plan=plan)
    fast = torch.compile(other, fullgraph=True, backend="eager")
    torch.testing.assert_close(fast(*batch())[0], model(*batch())[0])


def test_other_weights_are_divided_by_the_same_numbers():
    """Those of another seed, so that all processes of a group have the same factors."""
    model, plan = planned()
    other = unit_scale(gpt(1), plan=plan)
    for (name, p), q in zip(gpt(1).named_parameters(), other.parameters(), strict=True):
        divisor = model.get_parameter(name).mup_divisor
        if divisor is not None:
            torch.testing.assert_close(q * divisor, p)
            assert q.mup_divisor == divisor


def test_a_call_that_an_adopted_plan_does_not_have_is_warned_of():
    """As of a model whose code has changed since the plan was saved."""
    x = torch.randn(4, 8)
    model = unit_scale(Net(lambda m, x: m.a(x), a=nn.Linear(8, 8)))
    model(x)
    changed = Net(lambda m, x: m.a(x) + F.linear(x, m.a.weight), a=nn.Linear(8, 8))
    other = unit_scale(changed, plan=uu.plan(model))
    with pytest.warns(
        fp8.warnings.ScaleWarning, match="the adopted plan has no linear in the model itself"
    ):
        expected = other(x)
    assert torch.equal(other(x), expected)


def test_json():
    _, plan = planned()
    assert json.loads(plan.to_json())["init"] == "unit"
    text = str(plan)
    assert "plan of unit_scale(init='unit')" in text
    assert "terms=" in text


def test_other_fields_are_refused_by_name():
    _, plan = planned()
    data = json.loads(plan.to_json())
    without = {name: value for name, value in data.items() if name != "tags"}
    for bad, why in (
        ({**data, "colour": 1}, "unknown key of a plan 'colour'"),
        (without, "a plan needs the keys .*, without 'tags'"),
        ({**data, "version": 8}, "a plan of version 11 is needed, got version 8"),
        ([], "a plan is a dict of fields, got list"),
    ):
        with pytest.raises(ValueError, match=why):
            ModelPlan.from_json(json.dumps(bad))


def test_refused_by_name():
    _, plan = planned()
    with pytest.raises(ValueError, match="GPT is unit-scaled and has not run"):
        uu.plan(unit_scale(gpt()))
    with pytest.raises(ValueError, match="plan needs a model with unit_scale, got a GPT"):
        uu.plan(gpt())
    with pytest.raises(TypeError, match=r"plan needs an nn\.Module, got str"):
        uu.plan("model")
    with pytest.raises(ValueError, match=r"another model than this GPT: only one .* 'blocks\.2"):
        unit_scale(GPT(layers=3), plan=plan)
    with pytest.raises(ValueError, match="made with init='unit', got init='preserve'"):
        unit_scale(gpt(), plan=plan, init="preserve")
    with pytest.raises(ValueError, match="cannot be combined with functions in replace"):
        unit_scale(gpt(), {torch.relu: torch.tanh}, plan=plan)
    replaced = unit_scale(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {torch.relu: torch.tanh})
    replaced(torch.randn(1, 2))
    with pytest.raises(ValueError, match="with functions in replace cannot be saved"):
        uu.plan(replaced)
