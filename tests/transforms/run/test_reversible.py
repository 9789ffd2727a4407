"""Reversible layers: an autograd function that computes parts of the model again in its backward
pass, to which activations need not be kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.gradients import check_true, gradients
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


class _OfModule(_Reversible):
    """As `_Reversible`, by a module that adds, and that the backward pass does not run."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, block: nn.Module) -> Any:
        ctx.parts = block.f, block.g
        y, z = block(a, b)
        ctx.save_for_backward(y.detach(), z.detach())
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dz: Tensor) -> Any:
        return _Reversible.backward(ctx, dy, dz)[:3]


class Coupled(nn.Module):
    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.cat([a, b], -1).chunk(2, -1)
        y = a + self.f(b)
        return y, b + self.g(y)


class Net(nn.Module):
    def __init__(self, of_module: bool = False) -> None:
        super().__init__()
        self.of_module = of_module
        parts = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        pairs = zip(parts, parts, strict=True)
        self.parts = nn.ModuleList(Coupled(f, g) for f, g in pairs)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, -1)
        for part in self.parts:
            if self.of_module:
                a, b = _OfModule.apply(a, b, part)
            else:
                a, b = _Reversible.apply(a, b, part.f, part.g)
        return F.mse_loss(self.last(torch.cat([a, b], -1)), x[:, :4])


@pytest.mark.parametrize("of_module", [False, True])
@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_gradients_are_true(init: str, of_module: bool) -> None:
    torch.manual_seed(0)
    model, x = (
        unit_scale(Net(of_module).double(), init=init),
        torch.randn(32, 8, dtype=torch.float64),
    )
    first = gradients(model, lambda m: m(x))
    torch.testing.assert_close(first[1], check_true(model, lambda m: m(x)))
