"""Products with an added argument: gradients by finite differences, and the folded model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import check_slopes
from unit_scaling.transforms import unit_scale

Product = Callable[["Layers", Tensor], Tensor]

PRODUCTS: dict[str, Product] = {
    "linear": lambda m, x: F.linear(x, m.weight, m.bias),
    "linear by name": lambda m, x: F.linear(bias=m.bias, weight=m.weight, input=x),
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight),
    "addmm by name": lambda m, x: torch.addmm(mat2=m.weight, mat1=x, input=m.bias),
    "addmv": lambda m, x: torch.stack([torch.addmv(m.bias, m.weight, row) for row in x]),
    "bilinear": lambda m, x: F.bilinear(x, x.cos(), m.weight.expand(8, 8, 8), m.bias),
    "one number": lambda m, x: torch.addmm(m.bias[0], x, m.weight),
    "a term of addmm": lambda m, x: torch.addmm(x, x.cos(), m.weight, beta=0.5),
    "a vector of baddbmm": lambda m, x: torch.baddbmm(m.bias, x[None], m.weight[None])[0],
    "a term of baddbmm": lambda m, x: torch.baddbmm(x[None], x.cos()[None], m.weight[None])[0],
    "addbmm": lambda m, x: torch.addbmm(m.bias, x[None], m.weight[None]),
    "a term of addbmm": lambda m, x: torch.addbmm(x, x.cos()[None], m.weight[None]),
}


class Layers(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.product(self, self.first(x)))
        return y


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return unit_scale(Layers(PRODUCTS[name]).double()), torch.randn(16, 8, dtype=torch.float64)


BY_RULE = pytest.mark.xfail(reason="its weight has the factor of the rule", strict=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=BY_RULE if name == "addbmm" else ()) for name in PRODUCTS]
)
def test_gradients_are_true_up_to_powers_of_two(name: str) -> None:
    model, x = made(name)
    target = torch.randn(16, 4, dtype=torch.float64)
    exponents = check_slopes(model, lambda m: (m(x) - target).square().mean())
    assert {"first.weight", "weight", "last.weight"} <= exponents.keys()


@pytest.mark.parametrize("name", [name for name in PRODUCTS if not name.startswith("a term")])
def test_the_plain_model_computes_the_same(name: str) -> None:
    model, x = made(name)
    model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.eval()
    torch.testing.assert_close(uu.fold(model)(x), model(x))
