"""One of two processes of test_deepspeed: ``python deepspeed_worker.py RANK STORE``.

ZeRO of a converted model, against DistributedDataParallel in the same processes.
"""

import copy
import os
import sys

WORLD = 2
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1]}
os.environ |= {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import fp8  # noqa: E402
from tests.launch import as_rank  # noqa: E402


def make(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = fp8.convert(model, recipe)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(rank):
    return list(torch.randn(5, 8, 32, generator=torch.Generator().manual_seed(rank)))


def of_ddp(recipe, rank):
    model, optimizer = make(recipe)
    ddp, losses = DistributedDataParallel(model), []
    for x in batches(rank):
        loss = F.mse_loss(ddp(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_zero(recipe, rank, stage, folder):
    """The engine is saved and loaded into another one in between."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    losses = []
    for part, rows in enumerate((batches(rank)[:3], batches(rank)[3:])):
        model, optimizer = make(recipe)
        engine = deepspeed.initialize(
            model=model, optimizer=optimizer, config=copy.deepcopy(config)
        )[0]
        if part:
            engine.load_checkpoint(str(folder))
        for x in rows:
            loss = F.mse_loss(engine(x), x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if not part:
            engine.save_checkpoint(str(folder))
    return losses


def main(rank, store):
    deepspeed.init_distributed("gloo")
    for recipe in ("tensor", "mxfp8"):
        expected = of_ddp(recipe, rank)
        assert expected != sorted(expected)
        for stage in (1, 2):
            found = of_zero(recipe, rank, stage, store.parent / f"{recipe} {stage}")
            assert found == expected, (recipe, stage, found, expected)


if __name__ == "__main__":
    as_rank(main, WORLD)
