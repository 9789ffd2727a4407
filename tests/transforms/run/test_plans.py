"""The plan in a state_dict: written as JSON, and adopted without a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
from tests.launch import run_ranks
from tests.transforms.models import GPT, Net, batch, gpt, plan_of, same, step
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.plan.plan import ModelPlan


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the model was recorded")


def resumed(plain: nn.Module, model: nn.Module) -> Any:
    """The unit-scaled model of another process, with the checkpoint of one that has run."""
    other = unit_scale(plain)
    other.load_state_dict(model.state_dict())
    return other


def ran(plain: nn.Module) -> nn.Module:
    model = unit_scale(plain)
    step(model)
    return model


def test_the_same_bits_without_a_recording(monkeypatch):
    model = ran(gpt())
    want, report = step(model), str(uu.report(model))
    monkeypatch.setattr("unit_scaling.transforms.run.transform.learned", refuse)
    other = resumed(gpt(1), model)
    same(step(other), want)
    assert str(uu.report(other)) == report
    assert plan_of(other) == plan_of(model) == ModelPlan.from_json(plan_of(model).to_json())
    assert other.state_dict().keys() == model.state_dict().keys()


def test_a_compiled_graph_needs_no_first_call():
    model = ran(gpt())
    fast = torch.compile(resumed(gpt(), model), fullgraph=True, backend="eager")
    torch.testing.assert_close(fast(*batch())[0], model(*batch())[0])


def test_a_call_that_the_plan_does_not_have_is_warned_of():
    """As of a model whose code has changed since the plan was saved."""
    x = torch.randn(4, 8)
    model = unit_scale(Net(lambda m, x: m.a(x), a=nn.Linear(8, 8)))
    model(x)
    changed = Net(lambda m, x: m.a(x) + F.linear(x, m.a.weight), a=nn.Linear(8, 8))
    other = resumed(changed, model)
    with pytest.warns(
        fp8.warnings.ScaleWarning, match="the plan of the checkpoint has no linear in the model"
    ):
        expected = other(x)
    assert torch.equal(other(x), expected)


def test_the_plan_of_another_model_is_left():
    """As of a checkpoint that is loaded in part."""
    model, other = ran(gpt()), unit_scale(GPT(layers=3))
    other.load_state_dict(model.state_dict(), strict=False)
    assert not plan_of(other).entries
    step(other)
    assert plan_of(other).steps.keys() > plan_of(model).steps.keys()


def test_other_fields_are_refused_by_name():
    data = json.loads(plan_of(ran(gpt())).to_json())
    without = {name: value for name, value in data.items() if name != "tags"}
    for bad, why in (
        ({**data, "colour": 1}, "unknown key of a plan 'colour'"),
        (without, "a plan needs the keys .*, without 'tags'"),
        ({**data, "version": 8}, "a plan of version 12 is needed, got version 8"),
        ([], "a plan is a dict of fields, got list"),
    ):
        with pytest.raises(ValueError, match=why):
            ModelPlan.from_json(json.dumps(bad))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
def test_processes(tmp_path):
    """DistributedDataParallel: one plan for all. FSDP2: the gradients and steps of one process."""
    run_ranks(Path(__file__).with_name("plan_worker.py"), 2, tmp_path / "store")
