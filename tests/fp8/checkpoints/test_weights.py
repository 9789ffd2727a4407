"""`fp8.weights`: what an export writes, one tensor at a time."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fp8
from fp8.training.fsdp import gather_in_fp8
from tests.fp8.checkpoints.reading import exact, loaded, same
from tests.launch import needs_gloo, run_ranks
from tests.shared import (
    assert_close,
    descend,
    linears,
    normal,
    pairs,
    parametrize,
    proves,
    refuses,
)


def shared_net(recipe):
    """Rows that two processes do not share evenly, in one of its layers; a tie; a buffer."""
    torch.manual_seed(0)
    model = linears(64, 48, nn.GELU, 33, 64).append(nn.Embedding(10, 64))
    model.append(nn.Linear(64, 10, bias=False))
    model[5].weight = model[4].weight
    model.register_buffer("steps", torch.tensor(3))
    return fp8.convert(model, recipe, where=lambda name, layer: name != "5")


def check_equal(whole, sharded, folder):
    ours, theirs = fp8.weights(whole), fp8.weights(sharded)
    assert ours.manifest == theirs.manifest
    assert ours.tied == theirs.tied == {"5.weight": "4.weight"}
    assert (ours.nbytes, ours.config) == (theirs.nbytes, theirs.config)
    for (name, a), (other, b) in pairs(ours, theirs):
        assert name == other
        assert type(b.data) is torch.Tensor
        assert same(a, b), name
    fp8.export(sharded, folder)
    if dist.get_rank() == 0:
        fp8.export(whole, folder / "whole")
        files = [path / "model.safetensors" for path in (folder, folder / "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()
    dist.barrier()


def check_sharded(folder):
    for recipe in ("unit", "row", "mxfp8"):
        for gather in (False, True) if recipe == "unit" else (False,):
            model = shared_net(recipe)
            whole = deepcopy(model)
            if gather:
                gather_in_fp8(model, recipe)
            for part in (model[0], model[2], model):
                fully_shard(part)
            check_equal(whole, model, folder / f"{recipe}{gather}")
        model = shared_net(recipe)
        whole = deepcopy(model)
        mesh = dist.init_device_mesh("cpu", (2,))
        parallelize_module(
            model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        check_equal(whole, model, folder / f"{recipe} in parallel")


def check_sent(recipe):
    """Process 0 trains and sends, after each of two steps; process 1 has never seen the model."""
    x = normal(4, 7, 64, seed=1)
    stream = optimizer = model = None
    if dist.get_rank() == 0:
        model = fp8.convert(linears(64, 48, 64), recipe)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        stream = fp8.weights(model)
    for _ in range(2):
        about = [stream and (stream.manifest, stream.config)]
        dist.broadcast_object_list(about)
        manifest, config = about[0]
        tensors = dict(stream) if stream else {}
        for name, entry in manifest.items():
            tensor = tensors.setdefault(
                name, torch.empty(entry.shape, dtype=entry.dtype)
            )
            dist.broadcast(tensor.detach().flatten().view(torch.uint8), 0)
        plain = loaded(linears(64, 48, 64), tensors, config)
        with torch.no_grad():
            y = plain(x)
        if model is None:
            dist.send(y.contiguous(), 0)
            continue
        got = torch.empty_like(y)
        dist.recv(got, 1)
        assert torch.equal(got, y)
        want = model(x)
        assert_close(got, want.detach(), rtol=0, atol=1e-5 * float(want.abs().max()))
        descend(optimizer, [want.square().mean()])


def check_ranks(rank, store):
    check_sharded(store.parent)
    for recipe in ("unit", exact("row")):
        check_sent(recipe)


safetensors = pytest.importorskip("safetensors.torch")


def net(recipe):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32), nn.BatchNorm1d(32)]
    return fp8.convert(nn.Sequential(*layers), recipe)


@parametrize("recipe", "unit row block mxfp8".split())
def test_manifest(recipe, tmp_path):
    """Known before anything is cast; the tensors are those of an export."""
    model = net(recipe)
    stream = fp8.weights(model)
    found = dict(stream)
    fp8.export(model, tmp_path)
    exported = safetensors.load_file(tmp_path / "model.safetensors")
    assert found.keys() == exported.keys()
    assert all(same(found[name], exported[name]) for name in found)
    assert len(stream) == len(found)
    assert stream.manifest == {n: (tuple(t.shape), t.dtype) for n, t in found.items()}
    assert list(stream.manifest) == list(found)
    assert stream.nbytes == sum(t.numel() * t.element_size() for t in found.values())
    bits = 8.25 if recipe == "mxfp8" else 8
    elements = 128 * 64 + 32 * 128
    rest = 4 * (128 + 32 + 4 * 32) + 8  # biases, the norm, its count of batches
    assert 0 <= stream.nbytes - rest - elements * bits / 8 <= 4 * 160


def test_values_are_current_at_each_iteration():
    model = net("row")
    stream = fp8.weights(model)
    before = {name: tensor.clone() for name, tensor in stream}
    bias = dict(stream)["0.bias"]
    assert bias.data_ptr() == model[0].bias.data_ptr()  # nothing is copied
    assert not bias.requires_grad
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    assert all(same(a, b) for (_, a), (_, b) in pairs(stream, fp8.weights(model)))
    changed = [n for n, t in stream if not torch.equal(t.float(), before[n].float())]
    assert {"0.bias", "2.bias"} < set(changed)


def test_names_are_those_without_wrappers(one_process):
    names = list(fp8.weights(net("row")).manifest)
    assert list(fp8.weights(torch.compile(net("row"))).manifest) == names
    inside = net("row")
    inside[0] = torch.compile(inside[0])
    inside[2] = checkpoint_wrapper(inside[2])
    assert list(fp8.weights(inside).manifest) == names
    assert "0.weight_scale" in names
    wrapped = nn.parallel.DistributedDataParallel(net("row"))
    assert list(fp8.weights(wrapped).manifest) == names


@proves("the field", "weights sent to a running engine", how="library")
@needs_gloo
def test_two_processes(tmp_path):
    pytest.importorskip("compressed_tensors", reason="reads what is sent")
    run_ranks(check_ranks, 2, tmp_path / "store", warnings="default")


def test_refused():
    with refuses(r"an nn\.Module, got int", TypeError):
        fp8.weights(3)
    with refuses(r"fp8\.convert was not called"):
        fp8.weights(linears(2, 2))
