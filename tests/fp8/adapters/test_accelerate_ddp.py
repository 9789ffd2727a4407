"""Accelerate over DDP in two processes, run for real, at a level: the losses of a plain loop to the
bit, and training goes on from a checkpoint, in a new model, as if it had not stopped."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8
from fp8.adapters import accelerate
from fp8.casts.scaled_tensor import dequantized
from tests.fp8.adapters.loops import accelerated, plain_loop
from tests.launch import needs_gloo, run_ranks
from tests.shared import assert_same, linears, quietly

with quietly():
    Accelerator = pytest.importorskip("accelerate").Accelerator

WORLD, BATCH, STEPS, STOP = 2, 4, 8, 4


def make():
    torch.manual_seed(0)
    model = linears(32, 64, nn.GELU, 32)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model, x):
    return nn.functional.mse_loss(model(x), x)


def check_ranks(rank, store):
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    # Where they have met.
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.manual_seed(1)
    data = torch.randn(STEPS * BATCH * WORLD, 32)[rank::WORLD].split(BATCH)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def start():
        accelerator.free_memory()
        return accelerate.prepare(accelerator, *make(), recipe="unit", opt_level="O3")

    def train(model, optimizer, batches):
        return accelerated(accelerator, model, optimizer, batches, loss_of, clip=0.5)

    model, optimizer = start()
    losses = train(model, optimizer, data[:STOP])
    accelerator.save_state(str(store.with_name("checkpoint")))
    losses += train(model, optimizer, data[STOP:])
    other, second = make()
    fp8.initialize(other, second, "O3", "unit")
    ddp = DistributedDataParallel(other)
    assert losses == plain_loop(ddp, second, data, loss_of, clip=0.5, every=2)
    for p in model.parameters():
        weights = [torch.empty(p.shape) for _ in range(WORLD)]
        dist.all_gather(weights, dequantized(p.detach()))
        assert_same(*weights)
    again = start()
    accelerator.load_state(str(store.with_name("checkpoint")))
    assert train(*again, data[STOP:]) == losses[STOP:]


@needs_gloo
@pytest.mark.timeout(300)
def test_two_processes(tmp_path):
    # The library's own.
    run_ranks(check_ranks, 2, tmp_path / "store", 280, warnings="ignore")
