"""One of two processes of test_deepspeed: ``python deepspeed_worker.py RANK STORE``.

ZeRO of a converted model, against DistributedDataParallel in the same processes.
"""

import math
import os
import sys

WORLD = 2
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1]}
os.environ |= {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import deepspeed  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tests.engines.test_deepspeed import (  # noqa: E402
    batches,
    engine_of,
    loss_of,
    make,
    trained,
)
from tests.fp8.adapters.loops import plain_loop  # noqa: E402
from tests.launch import as_rank  # noqa: E402


def of_zero(recipe, rank, stage, folder):
    """The engine is saved and loaded into another one in between."""
    data = batches(5, rank)
    engine = engine_of(*make(recipe), stage)
    losses = trained(engine, data[:3])
    engine.save_checkpoint(str(folder))
    engine = engine_of(*make(recipe), stage)
    engine.load_checkpoint(str(folder))
    return losses + trained(engine, data[3:])


def main(rank, store):
    deepspeed.init_distributed("gloo")
    for recipe in ("tensor", "mxfp8"):
        model, optimizer = make(recipe)
        ddp = DistributedDataParallel(model)
        expected = plain_loop(ddp, optimizer, batches(5, rank), loss_of, clip=math.inf)
        assert expected != sorted(expected)
        for stage in (1, 2):
            found = of_zero(recipe, rank, stage, store.parent / f"{recipe} {stage}")
            assert found == expected, (recipe, stage, found, expected)


if __name__ == "__main__":
    as_rank(main, WORLD)
