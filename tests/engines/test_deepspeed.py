"""DeepSpeed, run for real on the CPU: ZeRO of converted models, and what of a level it refuses."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8
from tests.fp8.adapters.loops import plain_loop
from tests.launch import run_ranks
from tests.shared import linears, parametrize, proves, theirs

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip(
    "deepspeed", reason="its own environment: make test-engines"
)

pytestmark = [
    theirs,  # of deepspeed
    pytest.mark.timeout(900),  # it compiles a part of itself at its first run
]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory):
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(
        ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo"
    )
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=0, world_size=1
    )
    deepspeed.init_distributed("gloo")
    yield
    torch.distributed.destroy_process_group()


def make(recipe=None):
    torch.manual_seed(0)
    model = linears(32, 64, nn.GELU, 32)
    if recipe:
        fp8.convert(model, recipe)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(n=6, seed=1):
    return list(torch.randn(n, 8, 32, generator=torch.Generator().manual_seed(seed)))


def loss_of(model, x):
    return nn.functional.mse_loss(model(x), x)


def engine_of(model, optimizer, stage):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def trained(engine, data):
    """The losses of the engine's loop."""
    losses = []
    for x in data:
        loss = loss_of(engine, x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@proves("the field", "in DeepSpeed's ZeRO", how="library")
@parametrize("recipe, stage", [("tensor", 0), ("delayed", 1), ("mxfp8", 2)])
def test_zero(recipe, stage):
    """The losses are those of a plain loop, to the bit."""
    expected = plain_loop(*make(recipe), batches(), loss_of, clip=math.inf)
    model, optimizer = make(recipe)
    found = trained(engine_of(model, optimizer, stage), batches())
    assert found == expected
    assert found != sorted(found)  # it trains: not the losses of one set of weights
    assert all(p.dtype == torch.float32 for p in model.parameters())


@parametrize("level, stage", [("O2", 0), ("O3", 2)])
def test_levels_are_refused(level, stage):
    model, optimizer = make()
    model, optimizer = fp8.initialize(model, optimizer, level, "tensor")
    with pytest.raises(
        RuntimeError, match="DeepSpeed's engine holds and moves each weight"
    ):
        engine_of(model, optimizer, stage)


def test_two_processes(tmp_path):
    """The losses are those of DistributedDataParallel, to the bit, over a checkpoint too."""
    worker = Path(__file__).with_name("deepspeed_worker.py")
    run_ranks(worker, 2, tmp_path / "store", timeout=600, warnings="ignore")
