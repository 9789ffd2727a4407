"""Which adds are residual connections, what their branches weigh, and what their gradients are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
import unit_scaling.functional as U
from tests.transforms.models import Net, batch, gpt
from unit_scaling.transforms import unit_scale

attention = F.scaled_dot_product_attention


def grads(y: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    cotangent = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    return torch.autograd.grad(y, of, cotangent)


def residuals(model: nn.Module, x: Tensor) -> list[str]:
    model(x)
    return [row.why for row in uu.report(model) if row.why.startswith("residual add")]


RESIDUAL = {
    "pre-norm": (lambda m, x: x + m.a(F.layer_norm(x, (16,))), ["0.5"]),
    "post-norm": (lambda m, x: F.layer_norm(x + m.a(x), (16,)), ["0.5"]),
    "branch first": (lambda m, x: m.a(x) + x, ["0.5"]),
    "method": (lambda m, x: x.add(m.a(x)), ["0.5"]),
    "function": (lambda m, x: torch.add(x, other=m.a(x)), ["0.5"]),
    "in place": (lambda m, x: F.gelu(x).add_(m.a(F.gelu(x))) + 0, []),
    "attention": (lambda m, x: x + m.a(attention(x, x, x)), ["0.01"]),
    "two": (lambda m, x: (y := x + m.a(x)) + m.b(y), ["0.5", "0.5"]),
    "through a view": (lambda m, x: x.view(2, 4, 16) + m.a(x).view(2, 4, 16), ["0.5"]),
    "gelu by hand": (lambda m, x: m.a(x + 0.044715 * x**3), []),
    "bias": (lambda m, x: m.a(x) + m.b.weight[0], []),
    "not residual": (lambda m, x: m.a(x) + m.b(x), []),
    "nested": (lambda m, x: x + m.a(x + m.b(x)), ["0.5", "0.5"]),
    "parallel": (lambda m, x: x + m.a(x) + m.b(x), ["0.5", "0.5"]),
    "parallel, joined": (lambda m, x: m.a(x) + m.b(x) + x, ["0.707"]),
    "parallel, one norm": (
        lambda m, x: m.a(y := F.layer_norm(x, (16,))) + attention(y, y, m.b(y)) + x,
        ["0.5"],
    ),
    "parallel, nested": (lambda m, x: x + m.a(x + m.a(x) + m.b(x)), ["0.5"] * 3),
    "after the last": (lambda m, x: m.a(y := x + m.b(x)) + F.layer_norm(m.b(y), (16,)), ["0.5"]),
    "position": (lambda m, x: m.a(x) + m.b.weight[:8], []),
    "mask": (lambda m, x: m.a(x) + torch.zeros(16).fill_(-1e9) * (x.detach() > 9), []),
    "routed": (lambda m, x: x + m.a(x) * m.b(x).softmax(-1)[:, :1], ["0.5"]),
}


@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_adds_are_found(name: str) -> None:
    fn, taus = RESIDUAL[name]
    torch.manual_seed(0)
    model = unit_scale(Net(fn, a=nn.Linear(16, 16), b=nn.Linear(16, 16)))
    found = residuals(model, torch.randn(8, 16))
    assert [f.split()[-1] for f in found] == taus


@pytest.mark.parametrize("name", RESIDUAL)
def test_the_gradient_is_that_of_what_is_computed(name: str) -> None:
    """However branches are nested and share what they read: no factor is missed on any path."""
    torch.manual_seed(0)
    net = Net(RESIDUAL[name][0], a=nn.Linear(16, 16), b=nn.Linear(16, 16)).double()
    model = unit_scale(
        Net(lambda m, x: (y := m.net(x).view(8, 16)) + torch.tanh(x * y.mean()), net=net)
    )
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    model(x)
    torch.autograd.gradcheck(model, x, fast_mode=True)


def test_residual_gradient_is_delayed_to_the_branch() -> None:
    """Forward tau / sqrt(1 + tau^2); backward that factor only where the branch leaves."""
    torch.manual_seed(0)
    model = unit_scale(Net(lambda m, x: x + m.a(x), a=nn.Linear(16, 16, bias=False)))
    x = torch.randn(64, 16, requires_grad=True)
    y = model(x)
    skip, weight = 1.25**-0.5, model.a.weight
    branch = U.linear(x, weight)
    torch.testing.assert_close(y, skip * x + 0.5 * skip * branch)
    dx, dw = grads(y, x, weight)
    expected_dx, expected_dw = grads(branch, x, weight)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(dw, expected_dw)
    torch.testing.assert_close(dx, skip * cotangent + 0.5 * skip * expected_dx)


def test_residual_search_is_linear() -> None:
    """A ladder of adds has exponentially many paths; the search takes none of them twice."""

    def ladder(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(200):
            x = m.a(x) + m.b(x)
        return x

    model = unit_scale(Net(ladder, a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    assert residuals(model, torch.randn(2, 4)) == []


def test_umup_residual_rule() -> None:
    model = unit_scale(gpt(), residual="umup")
    model(*batch())
    rule = uu.transformer_residual_scaling_rule()
    found = [r.why for r in uu.report(model) if r.why.startswith("residual")]
    assert found == [f"residual add, tau {rule(i, 4):.3g}" for i in range(4)]
