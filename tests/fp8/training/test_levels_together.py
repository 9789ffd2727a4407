"""Levels with what else there is: torch.compile, unit scaling, DDP, checkpointed activations."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fp8
import unit_scaling as uu
from fp8.casts.scaled_tensor import ScaledTensor
from fp8.training.gradient_hook import all_reduce_hook
from fp8.training.levels import LEVELS
from tests.shared import (
    descend,
    linears,
    normal,
    pairs,
    parametrize,
    pickled,
    proves,
    refuses,
    sampled,
    saved,
)

unit_adamw = partial(uu.optim.AdamW, allow_non_unit_scaling_params=True)
each_level = parametrize("level", LEVELS)


def build(
    level, recipe="unit", optimizer=torch.optim.AdamW, transform=lambda model: model
):
    torch.manual_seed(0)
    model = transform(linears(16, 32, nn.ReLU, 4))
    return fp8.initialize(model, optimizer(model.parameters(), lr=1e-2), level, recipe)


def run(model, optimizer, count=3, call=None):
    call, inputs = call or model, (normal(8, 16, seed=seed) for seed in range(count))
    return descend(optimizer, (call(x).square().mean() for x in inputs))


@sampled(4)
@proves("MS-AMP", "communication in FP8")
@each_level
@pytest.mark.usefixtures("one_process")
@parametrize("hooked", [False, True])
def test_ddp(level, hooked):
    """Gradients are ScaledTensors after DDP has averaged them, which for one process is nothing."""
    expected = run(*build(level))
    model, optimizer = build(level)
    parallel = nn.parallel.DistributedDataParallel(model)
    if hooked:
        parallel.register_comm_hook(None, all_reduce_hook)
    losses = run(model, optimizer, 3, parallel)
    assert losses == pytest.approx(expected, rel=0.02 if hooked else 0)
    assert isinstance(model[0].weight.grad, ScaledTensor)


@pytest.mark.usefixtures("one_process")
def test_a_model_inside_of_ddp_is_refused():
    """Its weights would be averaged no more; where unused ones are allowed, without a word."""
    model = linears(16, 32)
    parallel = nn.parallel.DistributedDataParallel(nn.Sequential(model))
    optimizer = torch.optim.AdamW(model.parameters())
    with refuses(r"0\.weight is still in use: a DistributedDataParallel"):
        fp8.initialize(model, optimizer)
    del parallel
    loss = model(torch.randn(2, 16)).sum()
    with refuses("an earlier forward pass is kept"):
        fp8.initialize(model, optimizer)
    del loss
    fp8.initialize(model, optimizer)


@pytest.mark.usefixtures("one_process")
def test_shards_are_refused():
    """They would be plain tensors, which the optimizer does not have."""
    model, _ = build("O2")
    with refuses("weight has a level, which no shard of it has"):
        fully_shard(model)
    assert isinstance(model[0].weight, ScaledTensor)


@pytest.mark.usefixtures("one_process")
def test_ddp_sends_weights_that_are_not_rounded():
    """So that masters, made in the first step, begin with the same values in all processes."""
    model, _ = build("O3")
    model[0].weight.data.mul_(0.3).add_(1e-3)
    before = model[0].weight.dequantize()
    nn.parallel.DistributedDataParallel(model)
    assert torch.equal(model[0].weight.dequantize(), before)


@sampled(3)
@each_level
@pytest.mark.usefixtures("one_process")
@parametrize("before", [0, 1])
def test_resume_from_a_distributed_checkpoint(level, before, tmp_path):
    """Into a model that has been trained, and into a new one, whose states are not there yet."""
    model, optimizer = build(level)
    run(model, optimizer)
    state = dict(pairs(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(state, checkpoint_id=tmp_path)
    expected = run(model, optimizer)
    model, optimizer = build(level)
    run(model, optimizer, before)
    read = dict(pairs(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(read, checkpoint_id=tmp_path)
    weights, states = read.values()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert run(model, optimizer) == expected


@parametrize("copied", [copy.deepcopy, pickled, partial(saved, weights_only=False)])
@parametrize("level, kind", [("O2", torch.optim.AdamW), ("O3", unit_adamw)])
def test_copies_train_on(level, copied, kind):
    """To the same bits. pickle cannot read torch's tensors in FP8, nor the name of a new class."""
    model = linears(16, 256, nn.ReLU, 16)
    model, optimizer = fp8.initialize(model, kind(model.parameters(), lr=1e-2), level)
    run(model, optimizer)
    copies = copied((model, optimizer))
    assert type(copies[1]) is type(optimizer)
    assert run(*copies) == run(model, optimizer)


@each_level
def test_a_change_of_dtype_in_training(level):
    """What has become coarse gets a master as well, where the level has one; there and back."""
    model, optimizer = build(level)
    losses = run(model, optimizer, 6)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        losses += run(
            model, optimizer, 6, lambda x, dtype=dtype: model(x.to(dtype)).float()
        )
        names = set(optimizer.state[model[0].bias])
        assert ("master" in names) == (level == "O3" and dtype == torch.bfloat16)
    assert losses[17] < losses[11] < losses[5] < losses[0]
