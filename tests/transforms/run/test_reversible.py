"""Reversible layers: an autograd function that computes parts of the model again in its backward
pass, to which activations need not be kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.gradients import check_slopes, check_true
from unit_scaling.transforms import unit_scale


class _Reversible(torch.autograd.Function):
    """(a, b) -> (a + f(b), b + g(a + f(b))). Source: Gomez et al. 2017, arXiv:1707.04585."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: nn.Module, g: nn.Module) -> Any:
        ctx.parts = f, g
        y = a + f(b)
        z = b + g(y)
        ctx.save_for_backward(y.detach(), z.detach())
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dz: Tensor) -> Any:
        (y, z), (f, g) = ctx.saved_tensors, ctx.parts
        with torch.enable_grad():
            y = y.requires_grad_()
            of_y = g(y)
            torch.autograd.backward(of_y, dz)
        dy, b = dy + y.grad, z - of_y.detach()
        with torch.enable_grad():
            b = b.requires_grad_()
            torch.autograd.backward(f(b), dy)
        return dy, dz + b.grad, None, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.parts = nn.ModuleList(parts)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, -1)
        for f, g in zip(self.parts[::2], self.parts[1::2], strict=True):
            a, b = _Reversible.apply(a, b, f, g)
        return F.mse_loss(self.last(torch.cat([a, b], -1)), x[:, :4])


@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_gradients_are_true(init: str) -> None:
    torch.manual_seed(0)
    model, x = unit_scale(Net().double(), init=init), torch.randn(32, 8, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
    powers = check_true(model, lambda m: m(x), rtol=1e-7)
    assert check_slopes(model, lambda m: m(x)) == powers
    assert init == "unit" or set(powers.values()) == {0}
