"""Compiled models whose results share memory: each has its own gauge, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unit_scaling.transforms import unit_scale

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "expanded": lambda s: (s, s.expand(4, 16, 3)),
    "a part": lambda s: {"all": s, "first": s[:, :1]},
    "turned": lambda s: [s.transpose(0, 1), s.flatten()],
    "distribution": lambda s: (s, torch.distributions.Normal(s, s.exp())),
}


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Any:
        return FORMS[self.form](self.down(torch.relu(self.up(x))))


def loss(output: Any) -> Tensor:
    values = output.values() if isinstance(output, dict) else output
    parts = [-v.log_prob(torch.ones(3)) if hasattr(v, "log_prob") else v.square() for v in values]
    return sum((part.mean() for part in parts), torch.zeros(()))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_eager_mode(form: str) -> None:
    torch.manual_seed(0)
    model, x = unit_scale(Model(form)), torch.randn(16, 8)
    loss(model(x)).backward()
    found = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        loss(call(x)).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for got, wanted in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
