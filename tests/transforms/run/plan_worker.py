"""One of two processes of test_plans: ``python plan_worker.py RANK STORE``."""

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fp8
import unit_scaling as uu
from fp8.distributed.fsdp import gather_in_fp8
from tests.launch import as_rank
from tests.transforms.models import plan_of
from unit_scaling.parameter import tags_of
from unit_scaling.transforms import unit_scale

WORLD = 2


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4, bias=False))


def sharded(model: nn.Module) -> Any:
    for part in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(part)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def train(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = uu.optim.AdamW(model.parameters(), weight_decay=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    named = model.named_parameters()
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named}


def check_one_function(rank: int) -> None:
    """Each process plans with a batch of its own size, and averages gradients of one function."""
    inner = unit_scale(net(0))
    model = DistributedDataParallel(inner)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(8 + rank, 16, generator=generator) * 30.0**rank
        (model(x).square().mean() * 100.0**rank).backward()
    found: list[Any] = [None] * WORLD
    distributed.all_gather_object(found, (plan_of(inner).steps, inner(torch.ones(1, 16))))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def main(rank: int, store: Path) -> None:
    check_one_function(rank)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    plain = net(0)
    for gathered in (False, True):
        one, two = (fp8.convert(unit_scale(plain), "unit") for _ in range(2))
        for model in (one, two):
            model(x)
        if gathered:
            gather_in_fp8(two, "unit")
        two = sharded(two)
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            assert tags_of(p) == tags_of(q)
        assert torch.equal(one(x), two(x))
        torch.testing.assert_close(train(two, x), train(one, x), rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    as_rank(main, WORLD)
