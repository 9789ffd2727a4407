"""DeepSpeed, run for real on the CPU: ZeRO of converted models, and what of a level it refuses."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
from tests.launch import run_ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip(
    "deepspeed", reason="its own environment: make test-engines"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of deepspeed
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


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(n=6):
    return list(torch.randn(n, 8, 32, generator=torch.Generator().manual_seed(1)))


def engine_of(model, optimizer, stage):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


@pytest.mark.proves("the field", "in DeepSpeed's ZeRO", how="library")
@pytest.mark.parametrize(
    ("recipe", "stage"), [("tensor", 0), ("delayed", 1), ("mxfp8", 2)]
)
def test_zero(recipe, stage):
    """The losses are those of a plain loop, to the bit."""
    model, optimizer = make()
    fp8.convert(model, recipe)
    expected = []
    for x in batches():
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model, optimizer = make()
    engine, found = engine_of(fp8.convert(model, recipe), optimizer, stage), []
    for x in batches():
        loss = F.mse_loss(engine(x), x)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    assert found == expected
    assert found != sorted(found)  # it trains: not the losses of one set of weights
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(("level", "stage"), [("O2", 0), ("O3", 2)])
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
