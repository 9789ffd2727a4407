"""Models that take gradients of their own have one gauge, so that these gradients are true."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import check_true, gradients
from unit_scaling.transforms import unit_scale


class Physics(nn.Module):
    """The derivatives by the positions are results beside the values."""

    def __init__(self, leaf: bool) -> None:
        super().__init__()
        layers = nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        self.leaf, self.net = leaf, nn.Sequential(*layers)
        self.shift = nn.Linear(3, 2)

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        if self.leaf:
            x = x.detach().requires_grad_()
        y = self.net(x + self.shift(given))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, slope


class Learning(nn.Module):
    """Its layers take a step of gradient descent before they are used: by `torch.autograd.grad`."""

    def __init__(self, second_order: bool) -> None:
        super().__init__()
        self.second_order = second_order
        self.first, self.last = nn.Linear(4, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def error(first: Tensor, last: Tensor) -> Tensor:
            return F.mse_loss(F.linear(F.relu(F.linear(x, first)), last), y)

        weights = self.first.weight, self.last.weight
        slopes = torch.autograd.grad(error(*weights), weights, create_graph=self.second_order)
        return error(*(w - 0.1 * s for w, s in zip(weights, slopes, strict=True)))


def physics(leaf: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, given = torch.rand(64, 2).double(), torch.randn(64, 3).double()
    return unit_scale(Physics(leaf).double()), x, given


def small_loss(results: tuple[Tensor, Tensor]) -> Tensor:
    """Its gradient at the results is far from RMS 1."""
    y, slope = results
    return 1e-5 * (y.square() + slope.square().sum(1, keepdim=True)).mean()


@pytest.mark.parametrize("leaf", [False, True])
def test_every_step_has_the_same_gauge(leaf: bool) -> None:
    """After the first step, that has shown the size of the loss, too."""
    model, x, given = physics(leaf)

    def loss(model: nn.Module) -> Tensor:
        return small_loss(model(x.clone().requires_grad_(), given))

    steps = [gradients(model, loss)[1] for _ in range(3)]
    assert all(torch.equal(steps[0][n], other[n]) for other in steps[1:] for n in steps[0])
    powers = check_true(physics(leaf)[0], loss)
    assert len(set(powers.values())) == 1


def test_inputs_have_the_true_gradients() -> None:
    """Those that the model takes a gradient by, and others; the model's own gradient too."""
    model, x, given = physics(leaf=False)
    for _ in range(3):
        inputs = [x.clone().requires_grad_(), given.clone().requires_grad_()]
        small_loss(model(*inputs)).backward()
    for i, found in enumerate(inputs):
        step = torch.zeros_like(found)
        step[0, 0] = 1e-5
        ends = []
        for sign in (1, -1):
            moved = [t + sign * step if k == i else t for k, t in enumerate((x, given))]
            ends.append(small_loss(model(moved[0].requires_grad_(), moved[1])))
        slope = (ends[0] - ends[1]).item() / 2e-5
        assert found.grad is not None
        assert found.grad[0, 0].item() == pytest.approx(slope, rel=1e-5)


def test_the_models_own_gradients_are_true() -> None:
    """In the step after the first, and for an input that requires a gradient."""
    model, x, given = physics(leaf=False)
    for _ in range(2):
        y, slope = model(x.requires_grad_(), given)
        small_loss((y, slope)).backward()
    ends = [model((x + d).detach().requires_grad_(), given)[0] for d in (1e-5, -1e-5)]
    expected = (ends[0] - ends[1]).squeeze(1) / 2e-5
    torch.testing.assert_close(slope.sum(1), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("second_order", [False, True])
def test_gradients_of_products_are_near_one(second_order: bool) -> None:
    """In the middle, those of the model's loss; those that it takes itself are as they are."""
    torch.manual_seed(0)
    model = unit_scale(Learning(second_order))
    batch = torch.randn(256, 4), torch.randn(256, 2)
    model(*batch).backward()
    rows = [row for row in uu.verify(model, batch) if row.kind == "gradient"]
    assert len(rows) == 4
    assert all(1 / 16 < row.rms < 16 for row in rows if row.number >= 2)
    double = unit_scale(Learning(second_order).double())
    check_true(double, lambda m: m(*(t.double() for t in batch)))


def test_a_preserved_model_has_its_own_gradients() -> None:
    torch.manual_seed(0)
    plain = Learning(second_order=True).double()
    batch = torch.randn(64, 4).double(), torch.randn(64, 2).double()
    ours = gradients(unit_scale(plain, init="preserve"), lambda m: m(*batch))
    theirs = gradients(plain, lambda m: m(*batch))
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(ours[1][n], theirs[1][n]) for n in theirs[1])


def test_a_penalty_without_parameters_is_unchanged() -> None:
    class Penalty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad((x @ x.T).sin().sum(), x, create_graph=True)
            return slope.square().mean()

    torch.manual_seed(0)
    inputs = [torch.randn(4, 4).double().requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    for penalty, x in zip((Penalty(), unit_scale(Penalty(), init="preserve")), inputs, strict=True):
        penalty(x).backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    unit_scale(Penalty())(inputs[0]).backward()
