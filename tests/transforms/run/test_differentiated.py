"""Gradients of a model that are differentiated, outside of it and in its backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import unit_scaling as uu
from fp8.common.pitfalls import ScaleWarning
from tests.transforms.gradients import check_slopes, check_true, gradients
from unit_scaling.transforms import unit_scale

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.enable_grad()
def penalty(model: nn.Module) -> Tensor:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return 100 * (slope.norm(dim=1) - 1).square().mean() + model(X).square().mean()


@torch.enable_grad()
def curvature(model: nn.Module) -> Tensor:
    x = X.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return (y[:, 0] + second.sum(-1)).square().mean()


@torch.enable_grad()
def adapted(model: nn.Module) -> Tensor:
    weights = dict(model.named_parameters())
    inner = (model(X) - 1).square().mean()
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
    return 50 * functional_call(model, fast, (X,)).square().mean()


LOSSES: dict[str, Callable[[nn.Module], Tensor]] = {
    "penalty": penalty,
    "curvature": curvature,
    "adapted": adapted,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_derivatives_are_true_after_the_first_call(
    loss: Callable[[nn.Module], Tensor], init: str
) -> None:
    plain = net()
    model = unit_scale(plain, init=init)
    model(X).sum().backward()  # makes plans with gauges
    with pytest.warns(ScaleWarning, match="From the next call on"):
        loss(model).backward()
    loss(model).backward()
    for each in (model, copy.deepcopy(model)):
        assert set(check_slopes(each, loss).values()) == {0}
    assert "they are differentiated" in str(uu.report(model))
    if init == "preserve":
        expected = gradients(plain, loss)
        found = gradients(model, loss)
        torch.testing.assert_close(found, expected)


def test_a_plan_at_the_address_of_an_earlier_one_warns_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("unit_scaling.transforms.run.border.id", lambda _: 0, raising=False)
    for _ in range(2):
        model = unit_scale(net())
        model(X).sum().backward()
        with pytest.warns(ScaleWarning, match="From the next call on"):
            penalty(model)


class Equilibrium(nn.Module):
    """A fixed point, whose gradient a hook computes by iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.step, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        entered = self.enter(x)

        def step(z: Tensor) -> Tensor:
            return torch.tanh(0.3 * self.step(z) + entered)

        with torch.no_grad():
            z = torch.zeros_like(entered)
            for _ in range(60):
                z = step(z)
        z = step(z)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            after = step(start)

            def solve(grad: Tensor) -> Tensor:
                found = grad
                for _ in range(60):
                    (found,) = torch.autograd.grad(after, start, found, retain_graph=True)
                    found = found + grad
                return found

            z.register_hook(solve)
        return self.leave(z)


@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_a_hook_of_the_model_may_take_gradients(init: str) -> None:
    torch.manual_seed(0)
    model = unit_scale(Equilibrium().double(), init=init)
    powers = check_true(model, lambda m: 30 * m(X).square().mean())
    assert len(powers) == 6
    assert init == "unit" or set(powers.values()) == {0}


class Divergence(nn.Module):
    """The divergence of a vector field, by one vectorized backward pass: a continuous flow."""

    def __init__(self) -> None:
        super().__init__()
        self.field = net()
        self.field[4] = nn.Linear(32, 8).double()

    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        rows = torch.eye(8, dtype=x.dtype).unsqueeze(1).expand(8, len(x), 8)
        given = {"is_grads_batched": True, "create_graph": True}
        (slopes,) = torch.autograd.grad(self.field(x), x, rows, **given)
        return torch.einsum("ini->n", slopes)


def test_a_model_may_take_batches_of_gradients() -> None:
    """They have one dimension more than the tensors that they belong to."""
    model = unit_scale(Divergence())
    check_slopes(model, lambda m: (m(X) - 1).square().mean())
