"""Which adds are residual connections, what their branches weigh, and what their gradients are."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.models import Net, batch, gpt
from unit_scaling.parameter import set_depth
from unit_scaling.transforms import unit_scale

attention = F.scaled_dot_product_attention


def residuals(model: nn.Module, x: Any) -> list[str]:
    model(x)
    return [row.why for row in uu.report(model) if row.why.startswith("residual add")]


def layers() -> dict[str, nn.Module]:
    linear = {name: nn.Linear(16, 16) for name in "abc"}
    return {**linear, "rnn": nn.GRU(16, 16)}


RESIDUAL = {
    "pre-norm": (lambda m, x: x + m.a(F.layer_norm(x, (16,))), ["0.707"]),
    "post-norm": (lambda m, x: F.layer_norm(x + m.a(x), (16,)), ["0.707"]),
    "branch first": (lambda m, x: m.a(x) + x, ["0.707"]),
    "method": (lambda m, x: x.add(m.a(x)), ["0.707"]),
    "alpha": (lambda m, x: torch.add(x, m.a(x), alpha=2), ["0.707"]),
    "a number": (lambda m, x: m.a(x) + 1, []),
    "doubled": (lambda m, x: m.a(x + x), []),
    "with a flag by position": (lambda m, x: F.silu(m.a(x), False), []),
    "in place": (lambda m, x: F.gelu(x).add_(m.a(F.gelu(x))) + 0, []),
    "attention": (lambda m, x: x + m.a(attention(x, x, x)), ["0.707"]),
    "two": (lambda m, x: (y := x + m.a(x)) + m.b(y), ["0.707", "0.577"]),
    "through a view": (lambda m, x: x.view(2, 4, 16) + m.a(x).view(2, 4, 16), ["0.707"]),
    "gelu by hand": (lambda m, x: m.a(x + 0.044715 * x**3), []),
    "not residual": (lambda m, x: m.a(x) + m.b(x), []),
    "nested": (lambda m, x: x + m.a(x + m.b(x)), ["0.707", "0.707"]),
    "parallel": (lambda m, x: x + m.a(x) + m.b(x), ["0.707", "0.577"]),
    "parallel, joined": (lambda m, x: m.a(x) + m.b(x) + x, ["0.707"]),
    "parallel, one norm": (
        lambda m, x: m.a(y := F.layer_norm(x, (16,))) + attention(y, y, m.b(y)) + x,
        ["0.707"],
    ),
    "after the last": (lambda m, x: m.a(y := x + m.b(x)) + F.layer_norm(m.c(y), (16,)), ["0.707"]),
    "mask": (lambda m, x: m.a(x) + torch.zeros(16).fill_(-1e9) * (x.detach() > 9), []),
    "recurrent": (lambda m, x: x + m.rnn(x)[0], ["0.707"]),
    "routed": (lambda m, x: x + m.a(x) * m.b(x).softmax(-1)[:, :1], ["0.707"]),
}


def _delta_rule(m: nn.Module, x: Tensor) -> Tensor:
    k, v = F.normalize(m.a(x), dim=-1), m.b(x)
    state = x.new_zeros(16, 16)
    for i in range(len(x)):
        state = state + torch.outer(v[i] - state.mv(k[i]), k[i])
    return x @ state


def test_an_update_of_a_state_by_values_is_no_residual_branch() -> None:
    """With weights of the terms a delta rule, which is stable as it is, grew without bound."""
    torch.manual_seed(0)
    net, x = Net(_delta_rule, **layers()), torch.randn(64, 16)
    assert not residuals(model := unit_scale(net), x)
    assert model(x).std() < 8 * x.std()


def _solver(m: nn.Module, x: Tensor) -> Tensor:
    for _ in range(4):
        k = m.a(torch.tanh(x))
        x = x + (k + m.a(torch.tanh(x + k / 4))) / 8
    return m.b(x)


def test_sums_in_a_loop_keep_their_coefficients() -> None:
    """Those of a solver's steps: with weights of the terms, one of Runge and Kutta diverged."""
    torch.manual_seed(0)
    assert not residuals(unit_scale(Net(_solver, **layers())), torch.randn(64, 16))


@pytest.mark.proves("unit-scaling", "skip and residual additions", how="own")
@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_adds_are_found(name: str) -> None:
    fn, taus = RESIDUAL[name]
    torch.manual_seed(0)
    model = unit_scale(Net(fn, **layers()))
    found = residuals(model, torch.randn(8, 16))
    assert [f.split("tau ")[1].split(",")[0] for f in found] == taus


@pytest.mark.parametrize("size", [1.0, 2.0**5])
def test_a_residual_add_weighs_its_terms(size: float) -> None:
    """By tau / sqrt(1 + tau^2) and 1 / sqrt(1 + tau^2), each divided by its RMS in the first call,
    which is measured in float32."""
    torch.manual_seed(0)
    plain = Net(lambda m, x: x + m.a(x), a=nn.Linear(16, 16, bias=False))
    model = unit_scale(plain)
    model = model.double()
    x = torch.randn(64, 16, requires_grad=True, dtype=torch.float64)
    model(size * x)
    skip, weight = 1.5**-0.5, model.a.weight
    branch = F.linear(x, weight) / 4
    first = [size * t.detach().square().mean().sqrt() for t in (x, branch)]
    expected = skip * (x / first[0] + 0.5**0.5 * branch / first[1])
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    close(model(x), expected)
    of, g = (x, weight), torch.randn_like(expected)
    close(torch.autograd.grad(model(x), of, g), torch.autograd.grad(expected, of, g))


def test_residual_search_is_linear() -> None:
    """A ladder of adds has exponentially many paths; the search takes none of them twice."""

    def ladder(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(200):
            x = m.a(x) + m.b(x)
        return x

    model = unit_scale(Net(ladder, a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    assert residuals(model, torch.randn(2, 4)) == []


def test_completep_residual_rule() -> None:
    """The default: weights by the number of branches, and no depth but one that is set."""
    model = unit_scale(gpt())
    set_depth(model.blocks, 7)
    model(*batch())
    rule = uu.completep_residual_scaling_rule()
    found = [r.why for r in uu.report(model) if r.why.startswith("residual")]
    assert found == [f"residual add, tau {rule(i, 4):.3g}" for i in range(4)]
    assert {p.mup_scaling_depth for p in model.parameters()} == {None, 7}


@pytest.mark.parametrize("layers", [1, 2, 4, 16])
def test_branches_of_completep_are_equal_parts_of_the_stream(layers: int) -> None:
    """Of 4 / branches of its input, and of at most 1 / sqrt(2)."""
    rule, branches = uu.completep_residual_scaling_rule(), 2 * layers
    stream = 1.0
    for index in range(branches):
        part = rule(index, branches) * stream
        assert part == pytest.approx(min(2**-0.5, 4 / branches))
        stream = math.hypot(stream, part)
    stack = uu.TransformerStack(layers, rule, hidden_size=8, heads=2, is_causal=True, dropout_p=0)
    assert [layer.mlp_tau for layer in stack] == [rule(2 * i + 1, branches) for i in range(layers)]
    assert {p.mup_scaling_depth for p in stack.parameters()} == {None}


def test_a_shift_is_no_skip_connection() -> None:
    """adaLN: what modulates a branch is repeated over positions, though it depends on it."""

    def forward(m: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        x, condition = given
        gate, scale, shift = m.table(condition)[:, None].chunk(3, dim=-1)
        x = x + gate * m.a(F.layer_norm(x, (16,)))
        return x + m.b(F.layer_norm(x, (16,)) * (1 + scale) + shift)

    model = unit_scale(Net(forward, table=nn.Linear(16, 48), **layers()))
    assert len(residuals(model, (torch.randn(2, 5, 16), torch.randn(2, 16)))) == 2
