"""Sparse tensors within a model: results, values that are learned, products of two of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import unit_scaling as uu
from tests.transforms.gradients import check_true
from unit_scaling.transforms import simulate_fp8, unit_scale

NODES, EDGES = 16, 40
INDEX = torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))


def graph(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(INDEX, values, (NODES, NODES)).coalesce()


def ones(h: Tensor) -> Tensor:
    return graph(torch.ones(EDGES, dtype=h.dtype))


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared csr": lambda h, _: ((csr := ones(h).to_sparse_csr()) @ csr) @ h,
    "squared coo": lambda h, _: ((coo := ones(h)) @ coo) @ h,
    "learned, squared": lambda h, values: (
        torch.sparse.mm(graph(values), graph(values)).to_dense() @ h
    ),
    "scores": lambda h, _: torch.sparse.mm(
        torch.sparse.softmax(graph((h[INDEX[0]] * h[INDEX[1]]).sum(-1)), 1), h
    ),
}


class Network(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = FORMS[form]
        self.values = nn.Parameter(torch.rand(EDGES))
        self.up, self.down = nn.Linear(8, NODES), nn.Linear(NODES, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.form(self.up(x), self.values)) - y).square().mean()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(NODES, 8), torch.randn(NODES, 4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_gradients_are_true(form: str, init: str, batch: tuple[Tensor, Tensor]) -> None:
    x, y = (t.double() for t in batch)
    plain = Network(form).double()
    model = unit_scale(plain, init=init)
    model(x, y)
    check_true(model, lambda m: m(x, y))
    if init == "preserve":
        assert torch.equal(model(x, y), plain(x, y))


@pytest.mark.filterwarnings("ignore:.*sparse operands have no cast:fp8.warnings.RecipeWarning")
@pytest.mark.parametrize("form", FORMS)
def test_simulated_and_verified(form: str, batch: tuple[Tensor, Tensor]) -> None:
    model = unit_scale(Network(form))
    simulated = simulate_fp8(model)
    for _ in range(2):
        simulated(*batch).backward()
    assert all(p.grad.isfinite().all() for p in simulated.parameters() if p.grad is not None)
    assert uu.verify(model, batch).share("activation") > 0.7
