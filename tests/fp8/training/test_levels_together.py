"""Levels with what else there is: torch.compile, unit scaling, DDP, checkpointed activations."""

import copy
import io
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8
import unit_scaling as uu
from fp8.casts.scaled_tensor import ScaledTensor, dequantized, scaled
from fp8.training.gradient_hook import all_reduce_hook
from fp8.training.levels import LEVELS
from unit_scaling.transforms import unit_scale

unit_adamw = partial(uu.optim.AdamW, allow_non_unit_scaling_params=True)
each_level = pytest.mark.parametrize("level", LEVELS)


def build(level, recipe="unit", optimizer=torch.optim.AdamW, transform=lambda model: model):
    torch.manual_seed(0)
    model = transform(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    return fp8.initialize(model, optimizer(model.parameters(), lr=1e-2), level, recipe)


def run(model, optimizer, count=3, call=None):
    losses = []
    for seed in range(count):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = (call or model)(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.sampled(2)
@each_level
def test_compiled(level):
    """In one graph, and at O3 in another one after the first step, which rounds the weights: the
    first three losses are those of eager mode within a rounding of a gradient to e4m3 in each
    step."""
    expected = run(*build(level))
    model, optimizer = build(level)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert run(model, optimizer, 3, compiled) == pytest.approx(expected, rel=2**-6)
    assert len(graphs) == (2 if level == "O3" else 1)


@each_level
def test_unit_scaled_models(level):
    transform = partial(unit_scale, batch=torch.randn(8, 16))
    model, optimizer = build(level, optimizer=uu.optim.AdamW, transform=transform)
    (group,) = optimizer.param_groups
    assert len(set(group["mup_lr_scales"])) > 1
    assert model[0].weight.mup_type == "weight"
    losses = run(model, optimizer, 20)
    assert losses[-1] < losses[0]
    optimizer.add_param_group({"params": [uu.Parameter(torch.ones(4, 64), "weight")]})
    assert optimizer.param_groups[-1]["mup_lr_scales"] == [0.125]
    assert optimizer.param_groups[-1]["master_weights"] == LEVELS[level].master


@pytest.fixture
def _one_process():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.sampled(4)
@pytest.mark.proves("MS-AMP", "communication in FP8", how="own")
@each_level
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("hooked", [False, True])
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


@pytest.mark.usefixtures("_one_process")
def test_a_model_inside_of_ddp_is_refused():
    """Its weights would be averaged no more; where unused ones are allowed, without a word."""
    model = nn.Sequential(nn.Linear(16, 32))
    parallel = nn.parallel.DistributedDataParallel(nn.Sequential(model))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"0\.weight is still in use: a DistributedDataParallel"):
        fp8.initialize(model, optimizer)
    del parallel
    loss = model(torch.randn(2, 16)).sum()
    with pytest.raises(ValueError, match="an earlier forward pass is kept"):
        fp8.initialize(model, optimizer)
    del loss
    fp8.initialize(model, optimizer)


@pytest.mark.usefixtures("_one_process")
def test_shards_are_refused():
    """They would be plain tensors, which the optimizer does not have."""
    model, _ = build("O2")
    with pytest.raises(ValueError, match="weight has a level, which no shard of it has"):
        fully_shard(model)
    assert isinstance(model[0].weight, ScaledTensor)


@pytest.mark.usefixtures("_one_process")
def test_ddp_sends_weights_that_are_not_rounded():
    """So that masters, made in the first step, begin with the same values in all processes."""
    model, _ = build("O3")
    model[0].weight.data.mul_(0.3).add_(1e-3)
    before = model[0].weight.dequantize()
    nn.parallel.DistributedDataParallel(model)
    assert torch.equal(model[0].weight.dequantize(), before)


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("view", [False, True])
def test_ddp_adds_up_micro_batches(view):
    model, _ = build("O2", recipe=None)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
    x = torch.randn(8, 16)
    expected = torch.autograd.grad(model(x).square().mean(), model[0].weight)[0] * 32
    for _ in range(2):
        for i in range(32):
            with parallel.no_sync() if i < 31 else nullcontext():
                parallel(x).square().mean().backward()
        error = dequantized(model[0].weight.grad) - expected
        assert error.norm() < 2**-4 * expected.norm()
        model.zero_grad()


@pytest.mark.sampled(3)
@each_level
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("before", [0, 1])
def test_resume_from_a_distributed_checkpoint(level, before, tmp_path):
    """Into a model that has been trained, and into a new one, whose states are not there yet."""
    model, optimizer = build(level)
    run(model, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=tmp_path)
    expected = run(model, optimizer)
    model, optimizer = build(level)
    run(model, optimizer, before)
    read = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(read, checkpoint_id=tmp_path)
    weights, states = read.values()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert run(model, optimizer) == expected


@each_level
@pytest.mark.parametrize("trained", [0, 2])
def test_resume_from_before_the_first_step(level, trained):
    """Of a model that is new, or has taken a checkpoint: its weights are all that they were."""
    model, optimizer = build(level)
    if trained:
        run(model, optimizer, trained)
        plain_state = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).state_dict()
        model.load_state_dict(plain_state)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    other, second = build(level)
    run(other, second, 1)
    for target, state in zip((other, second), saved, strict=True):
        target.load_state_dict(state)
    assert run(other, second) == run(model, optimizer)


def pickled(things):
    return pickle.loads(pickle.dumps(things))


def saved(things):
    torch.save(things, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize(("level", "kind"), [("O2", torch.optim.AdamW), ("O3", unit_adamw)])
def test_copies_train_on(level, copied, kind):
    """To the same bits. pickle cannot read torch's tensors in FP8, nor the name of a new class."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16))
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
        losses += run(model, optimizer, 6, lambda x, dtype=dtype: model(x.to(dtype)).float())
        names = set(optimizer.state[model[0].bias])
        assert ("master" in names) == (level == "O3" and dtype == torch.bfloat16)
    assert losses[17] < losses[11] < losses[5] < losses[0]


def test_recomputed_activations():
    model, optimizer = build("O3")
    expected = run(*build("O3"))
    again = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    assert run(model, optimizer, 3, again) == expected


def test_what_is_written_to_an_e4m3_weight_is_its_master():
    weight = nn.Parameter(scaled(torch.ones(64, 64), "e4m3"))
    opt = fp8.optim.AdamW([weight], lr=1e-3, master_weights="float32", weight_decay=0.0)
    for value in (1.0, 5.0, -3.0):
        with torch.no_grad():
            weight.data.fill_(value)
        for _ in range(3):
            weight.grad = torch.full((64, 64), 1e-2)
            opt.step()
        assert (dequantized(weight, torch.float32) - value).abs().max() < 0.1
        (master,) = (x for name, x in opt.state[weight].items() if name.startswith("master"))
        assert 0 < (master - value).abs().max() < 0.01
