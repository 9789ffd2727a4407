"""Products of which two operands are one tensor: gradients of each are those of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.gradients import check_true
from unit_scaling.transforms import unit_scale

WIDTH = 16


class Twice(nn.Module):
    """Two products of one kind; the loss of one is ten thousand times that of the other, so that
    their gauges differ."""

    def __init__(self, product: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product
        self.up, self.one, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.form = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        small, large = self.one(self.product(self, h)), self.other(self.product(self, h))
        return 1e-4 * F.mse_loss(small, y) + F.mse_loss(large, y)


FORMS: dict[str, Callable[..., Tensor]] = {
    "matmul": lambda _, h: h @ h,
    "bmm": lambda _, h: torch.bmm(h, h),
    "einsum": lambda _, h: torch.einsum("bij,bjk->bik", h, h),
    "baddbmm": lambda _, h: torch.baddbmm(h, h, h, beta=0.5),
    "addmm": lambda m, h: _added(h.flatten(0, 1), m.weight).view_as(h),
    "bilinear": lambda m, h: m.form(h, h),
    "attention": lambda _, h: F.scaled_dot_product_attention(h, h, h),
    "weight": lambda m, h: h @ (m.weight @ m.weight),
}


def _added(h: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(h, h, weight, beta=0.5, alpha=0.5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_gradients_are_true(form: str, init: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, WIDTH, WIDTH, dtype=torch.float64)
    model = unit_scale(Twice(FORMS[form]).double(), init=init)
    check_true(model, lambda m: m(x, y))
