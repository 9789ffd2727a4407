"""A step of several forms of call, whose plans are all made before a gradient arrives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.transforms.gradients import check_true
from unit_scaling.transforms import unit_scale


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor, bounded: bool = False) -> Tensor:
        hidden = self.up(x).relu()
        return self.down(torch.tanh(hidden) * 3 if bounded else hidden)


X = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sizes", [(50.0, 1e-4), (1e-4, 50.0)])
def test_gradients_of_losses_of_any_size_are_true_from_the_first_step_on(sizes):
    first, second = sizes
    model = unit_scale(Branching().double())
    for _ in range(3):
        check_true(
            model,
            lambda m: first * m(X, True).square().mean() + second * m(X[:1, :1]).square().mean(),
        )
