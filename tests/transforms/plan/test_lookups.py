"""Products with one-hot rows are looked up; an argmin is that of distances as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

LETTERS, WIDTH = 64, 32
Products = dict[str, tuple[Callable[[Net, Tensor], Tensor], nn.Module]]

PRODUCTS: Products = {
    "linear": (lambda m, x: m.a(x), nn.Linear(LETTERS, WIDTH)),
    "matmul": (lambda m, x: x @ m.a.weight, nn.Embedding(LETTERS, WIDTH)),
    "conv1d": (lambda m, x: m.a(x.transpose(1, 2)), nn.Conv1d(LETTERS, WIDTH, 1)),
    "lstm": (lambda m, x: m.a(x)[0], nn.LSTM(LETTERS, WIDTH, batch_first=True)),
}


@pytest.mark.parametrize("given", ["letters", "rows"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_looked_up_has_unit_scale(name: str, given: str) -> None:
    """Whether the model makes the rows or is called with them; an LSTM's own output is smaller."""
    fn, layer = PRODUCTS[name]
    torch.manual_seed(0)
    ids = torch.randint(LETTERS, (64, 16))
    rows = F.one_hot(ids, LETTERS).float()
    model = unit_scale(
        Net(fn if given == "rows" else lambda m, x: fn(m, F.one_hot(x, LETTERS).float()), a=layer)
    )
    found = uu.verify(model, rows if given == "rows" else ids)
    rms = {row.tensor: row.rms for row in found}
    assert rms["input"] == pytest.approx(1, rel=1e-5)
    assert 0.25 < rms["output"] < 1.5
    assert 0.25 < rms["gradient of weight"] < 4


def test_a_weight_that_is_one_hot_and_rows_that_are_not_are_no_selection() -> None:
    torch.manual_seed(0)
    turn = nn.Linear(8, 8)
    nn.init.eye_(turn.weight)
    model, x = unit_scale(Net(lambda m, x: m.a.weight @ x, a=turn)), torch.randn(8, 8)
    torch.testing.assert_close(model(x), model.a.weight @ x / 8**0.5)
    plain = unit_scale(Net(lambda m, x: m.a(x), a=nn.Linear(8, 8)))
    two = torch.eye(8) + torch.eye(8).roll(1, 0)
    torch.testing.assert_close(plain(two), two @ plain.a.weight.T / 8**0.5)


class Quantizer(nn.Module):
    """VQ-VAE's: the distance is written out, the code looked up by a one-hot row."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes = nn.Linear(8, WIDTH), nn.Embedding(LETTERS, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, codes = self.encode(x), self.codes.weight
        distance = (y**2).sum(1, keepdim=True) + (codes**2).sum(1) - 2 * y @ codes.T
        nearest = distance.argmin(1)
        found = F.one_hot(nearest, LETTERS).float() @ codes
        return y + (found - y).detach(), y, nearest


def test_the_nearest_code_is_found_and_handed_on() -> None:
    torch.manual_seed(0)
    model = unit_scale(Quantizer())
    quantized, y, nearest = model(torch.randn(100, 8))
    codes = model.codes.weight
    assert torch.equal(nearest, torch.cdist(y, codes).argmin(1))
    torch.testing.assert_close(quantized, codes[nearest])


def test_the_gradient_of_the_largest_of_many_has_unit_scale() -> None:
    """PointNet's maximum over points, on the only path."""
    torch.manual_seed(0)
    model = unit_scale(
        Net(lambda m, x: m.b(m.a(x).amax(1)), a=nn.Linear(8, WIDTH), b=nn.Linear(WIDTH, 8))
    )
    found = uu.verify(model, torch.randn(32, 100, 8))
    grads = [row.rms for row in found if row.path == "a" and row.kind == "gradient"]
    assert all(0.5 < rms < 2 for rms in grads), grads
