"""Results within objects that a model returns beside others: a loss reads them too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transforms.gradients import check_true
from unit_scaling.transforms import simulate_fp8, unit_scale


@dataclass
class Terms:
    hidden: Tensor
    scores: Tensor


class Cache:
    """Of no kind that anyone knows."""

    def __init__(self, hidden: Tensor, scores: Tensor) -> None:
        self.layers = [hidden, {"scores": scores}]


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Terms, lambda t: t.hidden.square().mean() + t.scores.square().mean()),
    "object": (
        Cache,
        lambda c: c.layers[0].square().mean() + c.layers[1]["scores"].square().mean(),
    ),
    "within a dict": (
        lambda h, s: {"cache": Cache(h, s)},
        lambda d: 0.01 * d["cache"].layers[0].square().mean(),
    ),
    "within an object, and a result": (
        lambda h, s: (h, Cache(h, s)),
        lambda both: both[0].square().mean() + both[1].layers[0].sin().mean(),
    ),
    "distribution": (
        lambda _, s: torch.distributions.Normal(s, s.exp()),
        lambda d: -d.log_prob(torch.ones(16, 3)).mean(),
    ),
}


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.up, self.mid = nn.Linear(8, 32), nn.Linear(32, 32)
        self.head, self.scores = nn.Linear(32, 3), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        hidden = F.relu(self.up(x))
        last = F.relu(self.mid(hidden))
        return self.head(last), FORMS[self.form][0](hidden, self.scores(last))


def loss(model: nn.Module, form: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    output, inner = model(torch.randn(16, 8, generator=generator).to(model.up.weight.dtype))
    target = torch.arange(16) % 3
    total: Tensor = 1e-3 * F.cross_entropy(output, target) + FORMS[form][1](inner)
    return total


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_gradients_are_true(form: str, init: str) -> None:
    torch.manual_seed(0)
    model = unit_scale(Model(form).double(), init=init)
    check_true(model, lambda m: loss(m, form))


class Table(nn.Module):
    """Returns what it computes from a parameter alone, beside what it computes from that."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.mid = nn.Embedding(6, 8), nn.Linear(8, 32), nn.Linear(32, 32)
        self.other, self.head = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = self.table.weight.expand(4, -1, -1)
        table = table * table.exp()
        hidden = self.mid(self.up(table.sin()).relu()) + self.other(x)
        return self.head(hidden.relu()), table


@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_results_computed_from_parameters_that_calls_read(init: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64)

    def loss(model: nn.Module) -> Tensor:
        output, table = model(x)
        return 1e-3 * output.square().mean() + table.square().mean()

    check_true(unit_scale(Table().double(), init=init), loss)


@pytest.mark.parametrize("form", ["dataclass", "object"])
def test_compiled(form: str) -> None:
    torch.manual_seed(0)
    model = unit_scale(Model(form))
    for _ in range(2):
        model.zero_grad()
        loss(model, form).backward()
    model.zero_grad()
    loss(model, form).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    loss_of = FORMS[form][1]
    generator = torch.Generator().manual_seed(0)
    output, inner = compiled(torch.randn(16, 8, generator=generator))
    (1e-3 * F.cross_entropy(output, torch.arange(16) % 3) + loss_of(inner)).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_simulated() -> None:
    torch.manual_seed(0)
    model = simulate_fp8(unit_scale(Model("dataclass")))
    for _ in range(2):
        loss(model, "dataclass").backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
