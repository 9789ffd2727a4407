"""Functions that no call shows: autograd functions, extensions, writes into views, vmap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import gradients
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

WIDTH, BATCH = 32, 16


class Kernel(torch.autograd.Function):
    """A product by numpy, as an extension computes it; its second result is a square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        y = x.detach().numpy() @ w.detach().numpy().T
        return torch.from_numpy(y), torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] @ w + 2 * x * grads[1], grads[0].mT @ x


class Sign(torch.autograd.Function):
    """No call of the forward pass has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


def kernel(m: Net, x: Tensor) -> Tensor:
    y, square = Kernel.apply(m.a(x), m.c.weight)
    return m.b(torch.tanh(y)) + square


def written_views(m: Net, x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer[:, :16].add_(3 * m.a(x)[:, :16])
    buffer[:, 16:].copy_(m.c(x)[:, 16:])
    return m.b(torch.tanh(buffer))


def ensemble(m: Net, x: Tensor) -> Tensor:
    weights = torch.stack([m.a.weight, m.c.weight])
    return m.b(torch.vmap(lambda w: torch.tanh(x @ w))(weights).mean(0))


Form = Callable[[Net, Tensor], Tensor]

FORMS: dict[str, tuple[Form, str]] = {
    "a kernel of an extension": (kernel, "Kernel"),
    "no call with a gradient": (lambda m, x: m.b(Sign.apply(m.a(x))), "Sign"),
    "a weight": (lambda m, x: m.b(F.linear(x, Sign.apply(10 * m.a.weight))), "Sign"),
    "writes into views": (written_views, ""),
    "vmap of a part": (ensemble, "Tanh"),
}
"""Name -> a model, and what its report calls the function; "" if nothing is left alone."""


@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_what_no_call_shows(name: str) -> None:
    """A preserved model has the plain one's."""
    torch.manual_seed(0)
    parts = {part: nn.Linear(WIDTH, WIDTH) for part in ("a", "b", "c")}
    form, called = FORMS[name]
    plain = Net(form, **parts).double()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    ours = unit_scale(copy.deepcopy(plain), init="preserve")

    def loss(model: nn.Module) -> Tensor:
        return F.mse_loss(model(x), x)

    for _ in range(3):
        expected, true = gradients(plain, loss)
        value, found = gradients(ours, loss)
        assert torch.equal(value, expected)
        assert found.keys() == true.keys()
        for path, grad in true.items():
            torch.testing.assert_close(found[path], grad, rtol=1e-12, atol=1e-14)
    names = [row.call for row in uu.report(ours).left_alone]
    assert called in names if called else not names
