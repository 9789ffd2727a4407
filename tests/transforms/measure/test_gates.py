"""The gauge of a recurrent cell is that of the gradients that its products receive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.measure.measuring import products_within


class Cells(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.enter, self.cell, self.leave = nn.Linear(16, 32), kind(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, state, outputs = self.enter(x).relu(), None, []
        for _ in range(4):
            state = self.cell(x, state)
            outputs.append(self.leave(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_gradients_of_gates_have_rms_1(kind: type[nn.RNNCellBase]) -> None:
    """Within the 1.5 octaves at which a product gets a gauge of its own."""
    torch.manual_seed(0)
    model, x = unit_scale(Cells(kind)), torch.randn(64, 16)
    found: list[float] = []
    for _ in range(3):
        loss = F.cross_entropy(model(x).flatten(0, 1), torch.arange(256) % 4)
        products = products_within(loss, x)
        assert len(products) == 13
        found.clear()
        for node in products:
            node.register_prehook(lambda grads: found.append(grads[0].square().mean().sqrt()))
        loss.backward()
    assert all(2**-1.5 < size < 2**1.5 for size in found), found
