"""One of two processes of test_weights: ``python weights_worker.py RANK STORE``.

Weights of sharded models are those of whole ones, and weights that one process sends make the other
one's model.
"""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fp8
from fp8.distributed.fsdp import gather_in_fp8
from tests.fp8.checkpoints.reading import loaded, same
from tests.launch import as_rank


def net(recipe: str) -> nn.Module:
    """Rows that two processes do not share evenly, in one of its layers; a tie; a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 33), nn.Linear(33, 64))
    model.append(nn.Embedding(10, 64))
    model.append(nn.Linear(64, 10, bias=False))
    model[5].weight = model[4].weight
    model.register_buffer("steps", torch.tensor(3))
    return fp8.convert(model, recipe, where=lambda name, layer: name != "5")


def check_equal(whole: nn.Module, sharded: nn.Module, folder: Path) -> None:
    ours, theirs = fp8.weights(whole), fp8.weights(sharded)
    assert ours.manifest == theirs.manifest
    assert ours.tied == theirs.tied == {"5.weight": "4.weight"}
    assert (ours.nbytes, ours.config) == (theirs.nbytes, theirs.config)
    for (name, a), (other, b) in zip(ours, theirs, strict=True):
        assert name == other
        assert type(b.data) is torch.Tensor
        assert same(a, b), name
    fp8.export(sharded, folder)
    if dist.get_rank() == 0:
        fp8.export(whole, folder / "whole")
        files = [path / "model.safetensors" for path in (folder, folder / "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()
    dist.barrier()


def check_sharded(folder: Path) -> None:
    for recipe in ("unit", "row", "block", "mxfp8", "nvfp4"):
        for gather in (False, True) if recipe == "unit" else (False,):
            model = net(recipe)
            whole = copy.deepcopy(model)
            if gather:
                gather_in_fp8(model, recipe)
            for part in (model[0], model[2], model):
                fully_shard(part)
            check_equal(whole, model, folder / f"{recipe}{gather}")
        model = net(recipe)
        whole = copy.deepcopy(model)
        mesh = dist.init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        check_equal(whole, model, folder / f"{recipe} in parallel")


def check_sent(recipe: str) -> None:
    """Process 0 trains and sends, after each of two steps; process 1 has never seen the model."""
    x = torch.randn(4, 7, 64, generator=torch.Generator().manual_seed(1))
    sizes = [(64, 48), (48, 64)]
    stream = optimizer = model = None
    if dist.get_rank() == 0:
        model = fp8.convert(nn.Sequential(*(nn.Linear(*size) for size in sizes)), recipe)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        stream = fp8.weights(model)
    for _ in range(2):
        about = [stream and (stream.manifest, stream.config)]
        dist.broadcast_object_list(about)
        manifest, config = about[0]
        tensors = dict(stream) if stream else {}
        for name, entry in manifest.items():
            tensor = tensors.setdefault(name, torch.empty(entry.shape, dtype=entry.dtype))
            dist.broadcast(tensor.detach().flatten().view(torch.uint8), 0)
        plain = loaded(nn.Sequential(*(nn.Linear(*size) for size in sizes)), tensors, config)
        with torch.no_grad():
            y = plain(x)
        if model is None:
            dist.send(y.contiguous(), 0)
            continue
        got = torch.empty_like(y)
        dist.recv(got, 1)
        assert torch.equal(got, y)
        want = model(x)
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-5 * float(want.abs().max()))
        want.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(rank: int, store: Path) -> None:
    check_sharded(store.parent)
    for recipe in ("unit", "exact rows"):
        check_sent(recipe if recipe in fp8.RECIPES else exact("row"))


def exact(scaling: str) -> fp8.Recipe:
    """With scales as compressed-tensors finds them: amax / 448."""
    cast = fp8.Cast(format="e4m3", scaling=scaling, rule="exact")
    return fp8.Recipe(name="exact rows", input=cast, weight=cast)


if __name__ == "__main__":
    as_rank(main, 2)
