"""One of two processes of test_one_function: ``python one_function_worker.py RANK STORE``.

Each makes its plan with a batch of its own length and size. Then both compute the same.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.launch import as_rank
from unit_scaling.transforms import unit_scale

WIDTH, CONTEXT = 16, 64


class Model(nn.Module):
    """Positions that are small beside values, and a function of three projections of their sum."""

    def __init__(self, mix) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.positions[: x.shape[-2]]
        return self.head(self.mix(*self.qkv(x).chunk(3, -1)))


MIXES = {
    "attention": F.scaled_dot_product_attention,
    "composed": lambda q, k, v: torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v,
    "linear": lambda q, k, v: q @ (k.mT @ v),
    "positions": lambda q, k, v: q + k + v,
}


def main(rank: int, _: Path) -> None:
    probe = torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(0))
    for name, mix in MIXES.items():
        torch.manual_seed(0)
        model = unit_scale(Model(mix))
        torch.manual_seed(1 + rank)
        model((1 + 2 * rank) * torch.randn(3 + rank, 8 * (1 + 6 * rank), WIDTH)).sum().backward()
        for training in (True, False):
            model.train(training)(torch.randn(2, 5 + 30 * rank, WIDTH))
            found: list[Tensor] = [torch.empty(0)] * 2
            dist.all_gather_object(found, model(probe).detach())
            assert torch.equal(*found), name


if __name__ == "__main__":
    as_rank(main, 2)
