"""A submodule that is called on its own, after the whole model has run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.transforms.gradients import gradients
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale


def deep(recomputed: bool) -> nn.Module:
    """Three residual branches, whose weights depend on their number, and a product over
    positions."""

    def forward(m: Net, x: Tensor) -> Tensor:
        for part in m.parts:
            x = checkpoint(part, x, use_reentrant=False) if recomputed else part(x)
        return m.head(x)

    blocks = (nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in "abc")
    return Net(forward, parts=nn.ModuleList(map(Part, blocks)), head=nn.Linear(8, 4))


class Part(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.key = block, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.block(x)
        return x @ (self.key(x).mT @ x)


@pytest.mark.parametrize("recomputed", [False, True])
def test_parts_of_a_planned_model_have_the_factors_of_the_whole(recomputed: bool) -> None:
    torch.manual_seed(0)
    plain = deep(recomputed).double()
    model = unit_scale(plain)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    for _ in range(2):
        model(x).square().mean().backward()
    other = unit_scale(plain)
    other.load_state_dict(model.state_dict())  # with its plan
    losses = [lambda m: m(x).square().mean()]
    losses += [lambda m, i=i: m.parts[i](x).square().mean() for i in range(3)]
    for loss in losses:
        torch.testing.assert_close(gradients(other, loss), gradients(model, loss))
