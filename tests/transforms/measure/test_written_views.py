"""Results of products that are views, and are written in place through another view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import check_true
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.run.install import find_scope
from unit_scaling.transforms.run.scope import UnitScale

WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda h: h,
    "masked": lambda h: h.transpose(0, 1).index_fill_(0, torch.tensor([0]), 0.0).transpose(0, 1),
    "halved": lambda h: h.view(-1, 4).mul_(0.5).view_as(h),
    "itself": lambda h: h.mul_(0.5),
}


class Writing(nn.Module):
    """A branch whose result is written into, with a smaller gradient than what it is added to."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = WRITES[write]
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        h = 1e-3 * self.write(self.down(h)).sigmoid() + h
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6, 8), torch.randint(4, (4, 6))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("scaled", [False, True])
def test_verify_has_the_gradient_of_each_output(write: str, scaled: bool) -> None:
    x, y = batch()
    model = Writing(write)
    found = uu.verify(unit_scale(model) if scaled else model, (x, y))
    rows = {row.path: row for row in found.rows if row.tensor == "gradient of output"}
    assert rows.keys() == {"up", "down", "head"}
    assert not scaled or all(row.inside for row in rows.values())


@pytest.mark.parametrize("write", WRITES)
def test_they_have_gauges(write: str) -> None:
    x, y = batch()
    model = unit_scale(Writing(write).double())
    check_true(model, lambda m: m(x.double(), y))
    (plan,) = find_scope(model, UnitScale).plans.values()
    assert not plan.unseen
