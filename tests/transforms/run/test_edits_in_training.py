"""A model that is edited after training has its function and the gradients of its optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unit_scaling as uu
from unit_scaling.transforms import unit_scale

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Mixed(nn.Module):
    """Calls whose factors are measured, as no rule knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(8, 8), Residual(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.enter(x).relu()).cumsum(-1)
        return self.leave(x * x.abs())


def trained(loss: Callable[[nn.Module], Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model far from its first weights, and gradients that its optimizer knows."""
    torch.manual_seed(0)
    model = unit_scale(Mixed())
    optimizer = uu.optim.AdamW(model.parameters(), lr=1.0)
    for _ in range(12):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    model.zero_grad()
    loss(model).backward()
    return model, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


TRIVIAL: dict[str, Callable[[Any], Any]] = {
    "added": lambda model: setattr(model, "more", nn.Identity()),
    "wrapped": lambda model: setattr(model, "block", nn.Sequential(model.block)),
    "wrapped twice": lambda model: setattr(
        model, "block", nn.Sequential(nn.Sequential(model.block))
    ),
}


@pytest.mark.parametrize("change", TRIVIAL.values(), ids=TRIVIAL)
def test_an_edit_keeps_the_function_of_a_trained_model(change: Callable[[Any], Any]) -> None:
    """Measured factors, and the powers of two of gradients, which the optimizer has seen."""

    def loss(model: nn.Module) -> Tensor:
        return 50 * (model(X) - 5).square().mean()

    model, grads = trained(loss)
    before, count = model(X), len(grads)
    change(model)
    assert torch.equal(model(X), before)
    model.zero_grad()
    loss(model).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == count
    for ours, known in zip(found, grads.values(), strict=True):
        torch.testing.assert_close(ours, known)
