"""One of two processes of test_static: ``python static_worker.py RANK STORE``."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8
from tests.launch import as_rank

WORLD = 2


def make() -> nn.Module:
    torch.manual_seed(0)
    return fp8.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), "static")


def square(y: Tensor) -> Tensor:
    return y.square().sum()


def main(rank: int, store: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randn(64, 16, generator=generator)
        * torch.tensor([1.0, 64.0]).repeat_interleave(32)[:, None]
    )
    model = DistributedDataParallel(make())
    group = torch.distributed.new_group([rank], use_local_synchronization=True)
    whole = fp8.calibrate(make(), x, square, group=group)
    own = fp8.calibrate(make(), x.chunk(WORLD)[rank], square, group=group)
    assert own != whole
    assert fp8.calibrate(model, x.chunk(WORLD)[rank], square) == whole
    model(x.chunk(WORLD)[rank]).sum().backward()
    assert fp8.calibration(model) == whole


if __name__ == "__main__":
    as_rank(main, WORLD)
