"""Sums by index whose rows have weights: those of a softmax over neighbours, and of a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import unit_scale

NODES, EDGES, WIDTH, HEADS = 200, 1600, 64, 4


def edges() -> tuple[Tensor, Tensor]:
    source, to = torch.randint(NODES, (2, EDGES))
    return source, to


class Neighbours(nn.Module):
    """Graph attention (GAT): a softmax over the neighbours of a node, written with a sum by index.

    form: how the weights are divided, as it is written by hand and by libraries.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.layer, self.form = nn.Linear(WIDTH, WIDTH), form
        self.a, self.b = (nn.Parameter(torch.randn(HEADS, WIDTH // HEADS)) for _ in range(2))

    def softmax(self, logits: Tensor, to: Tensor) -> Tensor:
        places, zeros = to[:, None].expand_as(logits), logits.new_zeros(NODES, HEADS)
        most = zeros.scatter_reduce(0, places, logits.detach(), "amax", include_self=False)
        weights = (logits - most[to]).exp()
        if self.form == "scatter":
            return weights / (zeros.scatter_add(0, places, weights) + 1e-16).gather(0, places)
        if self.form == "in place":
            return weights / zeros.scatter_add_(0, places, weights).clamp_min(1e-16)[to]
        return weights / (zeros.index_add(0, to, weights)[to] + 1e-16)

    def forward(self, x: Tensor, source: Tensor, to: Tensor, y: Tensor) -> Tensor:
        h = self.layer(torch.tanh(self.inp(x))).view(-1, HEADS, WIDTH // HEADS)
        logits = F.leaky_relu((h * self.a).sum(-1)[source] + (h * self.b).sum(-1)[to], 0.2)
        rows = h[source] * self.softmax(logits, to).unsqueeze(-1)
        x = torch.zeros_like(h).index_add(0, to, rows).flatten(1)
        return F.cross_entropy(self.head(torch.tanh(x)), y)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        return torch.randn(NODES, 8), *edges(), torch.arange(NODES) % 8


@pytest.mark.parametrize("form", ["scatter", "in place", "index"])
def test_attention_to_neighbours_is_an_average(form: str) -> None:
    """Of 8 rows: its factor is sqrt(8), and the weights add up to 1 as they did."""
    torch.manual_seed(0)
    model, batch = unit_scale(Neighbours(form)), Neighbours.batch()
    model(*batch)
    found = uu.verify(model, batch)
    rms = next(r.rms for r in found.rows if (r.path, r.tensor) == ("head", "input"))
    assert 0.8 < rms < 1.25, found
    assert found.share("gradient") == 1, found
    why = [row.why for row in uu.report(model) if row.call in ("scatter_add", "scatter_add_")]
    assert all(each == "the sum of weights that are divided by it" for each in why)


class Weighted(nn.Module):
    """Graph convolution (GCN): rows times 1/sqrt(d_i d_j), numbers that come with the graph."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor, source: Tensor, to: Tensor) -> Tensor:
        degrees = torch.zeros(NODES).index_add(0, to, torch.ones(EDGES)).clamp(min=1)
        weights = self.scale * (degrees[source] * degrees[to]).rsqrt()
        rows = self.layer(x)[source] * weights[:, None]
        return self.head(torch.zeros(NODES, WIDTH).index_add(0, to, rows))


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_rows_times_numbers_have_unit_scale(scale: float) -> None:
    torch.manual_seed(0)
    found = uu.verify(unit_scale(Weighted(scale)), (torch.randn(NODES, WIDTH), *edges()))
    rows = {(r.path, r.tensor): r.rms for r in found.rows}
    assert 0.8 < rows["head", "input"] < 1.25, found
    assert 0.5 < rows["layer", "gradient of output"] < 2, found
