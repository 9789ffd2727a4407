"""A checkpoint of a unit-scaled model says so, by a key that the plain class refuses."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fp8
import unit_scaling as uu
from tests.transforms.models import Net, plan_of
from unit_scaling.transforms import simulate_fp8, unit_scale
from unit_scaling.transforms.state import EXTRA_STATE, MARKER, _unpacked

PLAIN = "is unit-scaled and these are the weights of the plain model: .* before unit_scale"


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    return nn.Sequential(body, nn.GELU(), nn.Linear(8, 4))


X = torch.linspace(-2, 2, 32).view(4, 8)


def same(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(model(X), other(X), rtol=0, atol=0)


@pytest.fixture
def one_process(tmp_path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_plain_class_refuses_it():
    model = unit_scale(plain())
    model(X)
    state = model.state_dict()
    assert {*state} - {*plain().state_dict()} == {MARKER, EXTRA_STATE}
    assert "load_into_unit_scale" in MARKER
    with pytest.raises(RuntimeError, match=rf"Unexpected key.*{MARKER}"):
        plain().load_state_dict(state)
    other = unit_scale(plain(1))
    assert not any(other.load_state_dict(state))
    same(other, model)


def test_an_edited_model_saves_its_new_plan():
    model = unit_scale(plain())
    model(X)
    before = plan_of(model)
    model[1] = Net(lambda m, x: x @ x.mT @ x)
    model(X)
    assert _unpacked(model.state_dict()[EXTRA_STATE]) == plan_of(model).to_json()
    assert plan_of(model).steps.keys() > before.steps.keys()


def kept_weight() -> nn.Module:
    return Net(
        lambda m, x: m.out(F.linear(x, F.normalize(m.inner.weight) + m.inner.weight)),
        inner=nn.Linear(8, 8),
        out=nn.Linear(8, 8),
    )


def two(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return unit_scale(Net(lambda m, x: m.b(m.a(x)), a=kept_weight(), b=kept_weight()))


PARTS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: None,
    "one": lambda model: model.a(X),
    "both": lambda model: model.b(model.a(X)),
    "the whole": lambda model: model(X),
}


@pytest.mark.parametrize("called", PARTS)
def test_what_has_run_of_a_model_is_saved(called):
    """Weights that keep their values are not given them back twice."""
    model, other = two(), two(1)
    PARTS[called](model)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    for _ in range(2):
        a, b = model.a(X), other.a(X)
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(model.b(a), other.b(b), rtol=0, atol=0)


def test_the_weights_from_before_the_first_call_come_back():
    """As after a search of a learning rate: the model computes what it did."""
    model = two()
    state = copy.deepcopy(model.state_dict())
    expected = model(X)
    optimizer = uu.optim.SGD(model.parameters(), lr=1.0)
    model(X).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model(X), expected)
    model.load_state_dict(state)
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)


def test_a_part_says_so_too():
    model = unit_scale(plain())
    state = model[0].state_dict()
    with pytest.raises(RuntimeError, match=MARKER):
        plain()[0].load_state_dict(state)
    unit_scale(plain(1))[0].load_state_dict(state)
    assert MARKER not in model[1].state_dict()  # nothing of it is scaled
    assert list(model[0][1].state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("assign", [False, True])
def test_plain_weights_are_refused_before_any_is_loaded(assign):
    model = unit_scale(plain())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=PLAIN):
        model.load_state_dict(plain(1).state_dict(), assign=assign)
    with pytest.raises(RuntimeError, match=PLAIN):
        model[0].load_state_dict(plain(1)[0].state_dict(), assign=assign)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with pytest.warns(fp8.warnings.CheckpointWarning, match=PLAIN):
        assert MARKER in model.load_state_dict(plain(1).state_dict(), strict=False)[0]
    with fp8.strict(), pytest.raises(fp8.warnings.CheckpointWarning, match=PLAIN):
        model.load_state_dict(plain(1).state_dict(), strict=False, assign=assign)


def test_what_is_no_checkpoint_of_it_is_no_news():
    """Adapters, say, that are loaded with strict=False."""
    model = unit_scale(plain())
    model.load_state_dict({}, strict=False)
    simulated = simulate_fp8(plain())
    simulated.load_state_dict(plain().state_dict())
    assert list(simulated.state_dict()) == list(plain().state_dict())


def test_within_another_module():
    """It loads without load_state_dict of the model itself, which torch calls for the outer one."""
    outer = nn.ModuleDict({"model": unit_scale(plain())})
    state = outer.state_dict()
    assert f"model.{MARKER}" in state
    assert not any(outer.load_state_dict(state))
    wrong = nn.ModuleDict({"model": plain(1)}).state_dict()
    with (
        pytest.warns(fp8.warnings.CheckpointWarning, match=PLAIN),
        pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "model.{MARKER}"'),
    ):
        outer.load_state_dict(wrong)


def test_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = unit_scale(plain())
    model(X)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = unit_scale(plain(1))
    other.load_state_dict(torch.load(file, weights_only=True))
    same(other, model)
    path = str(tmp_path / "model.safetensors")
    safetensors.save_model(model, path)
    other = unit_scale(plain(1))
    assert safetensors.load_model(other, path) == (set(), [])
    same(other, model)
    with pytest.raises(RuntimeError, match=MARKER):
        safetensors.load_model(plain(), path)


def test_distributed_checkpoints(tmp_path, one_process):
    """Loaded in place, into the state_dict of the model at hand."""
    model = unit_scale(plain())
    model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of one process
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "unit")
        dcp.save({"model": plain(1).state_dict()}, checkpoint_id=tmp_path / "plain")
        other = unit_scale(plain(2))
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "unit")
        assert not any(set_model_state_dict(other, state["model"]))
        same(other, model)
        with pytest.raises(dcp.api.CheckpointException, match=MARKER):
            dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "plain")


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_wrapped_for_several_devices(wrap, one_process):
    def wrapped(seed: int) -> nn.Module:
        model = unit_scale(plain(seed))
        model(X)
        return wrap(model)

    model, other, third = map(wrapped, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    assert not any(third.load_state_dict(model.state_dict()))
    same(third, unit_scale(plain()))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert MARKER in state
    assert not any(set_model_state_dict(other, dict(state), options=options))
    alone = unit_scale(plain(3))
    assert not any(alone.load_state_dict(state))
    for each in (other, alone):
        same(each, unit_scale(plain()))
