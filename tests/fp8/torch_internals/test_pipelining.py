"""Stages of torch.distributed.pipelining, two in one process: losses are those of a plain loop."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

import fp8
import unit_scaling as uu
from tests.launch import needs_gloo
from tests.shared import assert_close, linears, normal, pairs, parametrize
from unit_scaling.transforms import unit_scale

pytestmark = [needs_gloo, pytest.mark.usefixtures("one_process")]

PARTS = 2
"""Micro-batches of a step."""


@pytest.fixture
def garbage(monkeypatch):
    """What nothing has written is large."""
    empty = torch.empty_strided
    monkeypatch.setattr(
        torch, "empty_strided", lambda *a, **k: empty(*a, **k).fill_(2.0**100)
    )


def make(kind):
    torch.manual_seed(0)
    parts = [linears(16, 16, nn.GELU, 16) for _ in range(2)]
    if kind.startswith("unit_scale"):
        parts = [unit_scale(part) for part in parts]
    return [fp8.convert(part, kind.rpartition(" ")[2]) for part in parts]


def data(step):
    both = normal(2, 8, 16, seed=step)
    return both[0], both[1]


def step(parts, x, y):
    losses = []
    for inputs, targets in pairs(x.chunk(PARTS), y.chunk(PARTS)):
        loss = nn.functional.mse_loss(parts[1](parts[0](inputs)), targets)
        loss.backward()
        losses.append(loss.item())
    for parameter in nn.ModuleList(parts).parameters():
        parameter.grad /= PARTS  # as a schedule does
    return losses


@parametrize("kind", ["delayed", "static", "unit_scale unit"])
@pytest.mark.usefixtures("garbage")
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 sends between stages of a process"
)
def test_a_run_without_values_leaves_no_state(kind):
    """Before the first step stages are run, forward and backward, to find shapes."""
    parts = make(kind)
    expected = copy.deepcopy(parts)
    made = [
        PipelineStage(part, i, 2, torch.device("cpu")) for i, part in enumerate(parts)
    ]
    schedule = ScheduleInterleaved1F1B(made, PARTS, loss_fn=nn.functional.mse_loss)
    optimizers = [
        torch.optim.SGD(nn.ModuleList(p).parameters(), 0.5) for p in (parts, expected)
    ]
    for i in range(2):
        x, y = data(i)
        losses = []
        schedule.step(x, target=y, losses=losses)
        assert [loss.item() for loss in losses] == step(expected, x, y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for part, other in pairs(parts, expected):
        for mine, buffer in pairs(part.buffers(), other.buffers()):
            assert_close(mine, buffer)


MODELS = {
    "converted": fp8.convert(linears(16, 16, 16)),
    "products": nn.Sequential(uu.Linear(16, 16), uu.Linear(16, 16)),
    "functions": nn.Sequential(uu.Tanh(constraint=None), uu.GELU(constraint=None)),
}


@parametrize("model", MODELS.values(), ids=MODELS)
def test_the_graph_of_a_model_is_not_split(model):
    """It has no backward passes of autograd functions."""
    with pytest.raises(RuntimeError) as error:
        pipeline(
            model,
            (data(0)[0].requires_grad_(),),
            split_spec={"1": SplitPoint.BEGINNING},
        )
    assert "Make the stages of modules: PipelineStage" in str(error.value.__cause__)
