"""Positions that nothing reads at the end of a stream: their gradient comes through attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import unit_scale

WIDTH = 64


class Classifier(nn.Module):
    """Two attention branches on a class token and 16 patches. read: what the loss is of."""

    def __init__(self, read: Callable[[Tensor], Tensor], last: bool = False) -> None:
        super().__init__()
        self.patches, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.attention = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.read, self.last = read, last

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.token.expand(len(x), -1, -1), self.patches(x)]
        x = torch.cat(parts[::-1] if self.last else parts, dim=1)
        for layer in self.attention:
            y = F.layer_norm(x, (WIDTH,))
            x = x + layer(F.scaled_dot_product_attention(y, y, y))
        return self.head(self.read(F.layer_norm(x, (WIDTH,))))


READ = {
    "the token": (lambda x: x[:, 0], False, True),
    "select": (lambda x: x.select(1, 0), False, True),
    "at the end": (lambda x: x[:, -1], True, True),
    "a patch": (lambda x: x[:, -1], False, False),
    "both": (lambda x: x[:, 0] + x[:, 1], False, False),
    "the mean": (lambda x: x.mean(1), False, False),
    "all": (lambda x: x, False, False),
}


@pytest.mark.parametrize("residual", ["fixed", "umup"])
@pytest.mark.parametrize("case", READ)
def test_the_gradient_of_what_is_not_read_has_unit_scale(case: str, residual: str) -> None:
    read, last, unread = READ[case]
    torch.manual_seed(0)
    model = unit_scale(Classifier(read, last), residual=residual)
    x = torch.randn(32, 16, WIDTH)
    model(x)
    marked = [row for row in uu.report(model) if "not read" in row.why]
    assert [row.call for row in marked] == ["cat"] * unread
    if unread:
        rows = uu.verify(model, x).rows
        patches = [r.rms for r in rows if r.path == "patches" and r.kind == "gradient"]
        assert all(0.5 <= rms <= 2 for rms in patches), patches


def test_a_stream_may_be_turned_about() -> None:
    """As OpenAI's CLIP has it: positions first within the layers, last outside."""

    class Turned(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1)
            x = x.permute(1, 0, 2)
            for layer in self.attention:
                y = F.layer_norm(x, (WIDTH,)).permute(1, 0, 2)
                x = x + layer(F.scaled_dot_product_attention(y, y, y)).permute(1, 0, 2)
            return self.head(F.layer_norm(x.permute(1, 0, 2)[:, 0], (WIDTH,)))

    torch.manual_seed(0)
    model = unit_scale(Turned(lambda x: x))
    model(torch.randn(32, 16, WIDTH))
    assert [row.call for row in uu.report(model) if "not read" in row.why] == ["cat"]
