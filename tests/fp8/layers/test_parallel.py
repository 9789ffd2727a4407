"""Losses and gradients of DDP and FSDP2 over two processes, under fp8.autocast and in converted
models, are those of one process with the whole batch.

The recipes are those whose scales do not depend on how tokens are divided: operands are then equal
to the bit, up to the 2 by which each process's mean is larger, and only the order of sums differs:
n terms in float32 lose n * 2**-24 of the sum of magnitudes.
"""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fp8
from tests.launch import needs_gloo, run_ranks
from tests.shared import assert_close, linears, normal, pairs, proves

WORLD, TOKENS, WIDTH = 2, 256, 32
RECIPES = ("unit", "mxfp8", "bf16")
LOSS_SCALE = (
    4096.0  # no gradient is subnormal in e5m2, where a factor of 2 changes the rounding
)
# Bf16: each part is rounded to it.
BOUND = {None: 2 * TOKENS * 2**-24, torch.bfloat16: 2.0**-7}


def make():
    torch.manual_seed(0)
    return linears(WIDTH, 48, nn.GELU, 16)


def fsdp(model):
    for part in (model[0], model):
        fully_shard(part)
    return model


def batch():
    return normal(TOKENS, WIDTH, seed=1), normal(TOKENS, 16, seed=1)


def run(model, recipe, calls, dtype, parts, part):
    """Mean loss and gradients of one of ``parts`` of the batch, in ``calls`` micro-batches."""
    x, y = (t.chunk(parts)[part].chunk(calls) for t in batch())
    model.zero_grad()
    total = torch.zeros(())
    for inputs, targets in pairs(x, y):
        lower = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
        with lower, fp8.autocast(recipe) if recipe else contextlib.nullcontext():
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss = LOSS_SCALE * loss / calls
        loss.backward()
        total += loss.detach()
    grads = (p.grad for p in model.parameters())
    return total, [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def check(wrap, recipe, converted, calls, dtype):
    model = fp8.convert(make(), recipe) if converted else make()
    inside = None if converted else recipe
    loss, grads = run(copy.deepcopy(model), inside, 1, dtype, 1, 0)
    mine, got = run(wrap(model), inside, calls, dtype, WORLD, dist.get_rank())
    compare(loss, grads, mine, got, BOUND[dtype])


def compare(loss, grads, mine, got, bound):
    dist.all_reduce(mine)
    assert_close(mine / WORLD, loss, rtol=bound, atol=0)
    for one, other in pairs(got, grads):
        assert_close(one, other, rtol=0, atol=bound * float(other.abs().max()) * 4)


def check_delayed(wrap):
    """After one pass whose histories were made equal, the scales are those of the whole batch."""
    one, model = (fp8.convert(make(), "delayed") for _ in range(2))
    model = wrap(model)
    run(one, None, 1, None, 1, 0)
    run(model, None, 1, None, WORLD, dist.get_rank())
    fp8.reduce_amax(model)
    for (name, mine), (_, whole) in pairs(model.named_buffers(), one.named_buffers()):
        larger = WORLD if name.endswith("grad") else 1
        assert_close(mine, larger * whole, rtol=1e-6, atol=0)
    loss, grads = run(one, None, 1, None, 1, 0)
    mine, got = run(model, None, 1, None, WORLD, dist.get_rank())
    compare(loss, grads, mine, got, BOUND[None])


def check_ranks(rank, store):
    for wrap in (DistributedDataParallel, fsdp):
        for recipe in RECIPES:
            for converted in (False, True):
                check(wrap, recipe, converted, 1, None)
        check(wrap, "unit", True, 2, None)
        check(wrap, "unit", False, 2, None)
        check(wrap, "unit", True, 1, torch.bfloat16)
        check(wrap, "unit", False, 2, torch.bfloat16)
        check_delayed(wrap)


@proves("MS-AMP", "communication in FP8")
@needs_gloo
def test_two_processes(tmp_path):
    run_ranks(check_ranks, 2, tmp_path / "store")
