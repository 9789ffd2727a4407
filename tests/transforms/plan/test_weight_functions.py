"""Parameters in functions without a rule have the values that they had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import unit_scaling as uu
from tests.transforms.gradients import check_slopes, check_true
from unit_scaling.transforms import unit_scale

Function = Callable[..., Tensor]


class Net(nn.Module):
    """A layer, and a function of its output and of two small parameters."""

    def __init__(self, function: Function, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(8, 16)
        self.p, self.q = (nn.Parameter(torch.randn(shape) / 8) for shape in shapes)
        self.double()
        self.register_buffer("x", torch.randn(32, 8, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.function(F.relu(self.layer(self.x)), self.p, self.q)


def complex_product(h: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return torch.view_as_real(h.to(torch.complex128) @ torch.complex(p, q))


WEIGHTS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "kron": (lambda h, p, q: h @ torch.kron(p, q), (4, 4), (4, 2)),
    "complex": (complex_product, (16, 8), (16, 8)),
    "logaddexp": (lambda h, p, q: h @ (torch.logaddexp(p, q) - 0.7), (16, 8), (16, 8)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_computed_weight_has_unit_scale(name: str) -> None:
    """It is computed from the values that the parameters had."""
    model = unit_scale(Net(*WEIGHTS[name]))
    assert 0.25 < model().square().mean().sqrt() < 4
    assert not uu.report(model).left_alone
    check_true(model, lambda m: m().square().mean())
    check_slopes(model, lambda m: m().square().mean())


KEPT: dict[str, Function] = {
    "pairwise_distance": lambda h, p, q: (
        F.pairwise_distance(0 * h, p) + F.pairwise_distance(h * 0, q)
    ),
    "logaddexp": lambda h, p, q: torch.logaddexp(0 * h, p).logaddexp(q),
    "atan2": lambda h, p, q: torch.atan2(p, q + 0 * h),
    "kron": lambda h, p, q: torch.kron(p, q)[:32, :16] + 0 * h,
}


@pytest.mark.parametrize("name", KEPT)
def test_results_keep_their_values(name: str) -> None:
    model = Net(KEPT[name], (32, 16), (32, 16))
    torch.testing.assert_close(unit_scale(model)(), model(), rtol=1e-12, atol=1e-12)


def outside(function: Function) -> Function:
    return lambda h, p, q: torch.cat([(h.sigmoid() @ p).flatten(), function(h.sigmoid()).flatten()])


@pytest.mark.parametrize("function", [torch.logit, lambda s: torch.acos(2 * s - 1), torch.atanh])
def test_what_is_defined_on_an_interval_is_finite(function: Function) -> None:
    """Of an activation that a layer reads as well."""
    model = unit_scale(Net(outside(function), (16, 4), (1, 1)))
    assert model().isfinite().all()
    check_true(model, lambda m: m().square().mean())


def test_a_weight_of_a_function_that_no_plan_knows_is_reported() -> None:
    """It is computed from parameters of RMS 1, and is brought to RMS 1 itself."""
    model = unit_scale(Net(lambda h, p, q: h @ torch.special.i1(p), (16, 8), (1, 1)))
    assert 0.25 < model().square().mean().sqrt() < 4
    assert [row.call for row in uu.report(model).left_alone][:1] == ["special_i1"]


def test_all_calls_that_compute_a_weight_see_one_scale_of_its_parameter() -> None:
    """A replay does not see the call that finds the step of a grid; others round to that grid."""

    def rounded(h: Tensor, p: Tensor, q: Tensor) -> Tensor:
        step = torch.special.i1(p).amax() / 127
        return h @ (p + ((p / step).round() * step - p).detach())

    models = [unit_scale(Net(f, (16, 8), (1, 1))) for f in (rounded, lambda h, p, q: h @ p)]
    found, expected = (model() for model in models)
    assert "special_i1" in [row.call for row in uu.report(models[0]).left_alone]
    assert (found - expected).norm() < 0.02 * expected.norm()


class Noisy(nn.Module):
    """Weights that are drawn, as in Bayesian layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mean + self.spread * torch.randn(16, 16)
        return self.leave((self.enter(x) @ weight).relu())


def weight_normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 16)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(16, 16)),
        nn.ReLU(),
        nn.Linear(16, 4),
    )


@pytest.mark.parametrize("make", [Noisy, weight_normed])
def test_a_computed_weight_keeps_its_factor(make: Callable[[], nn.Module]) -> None:
    """Evaluation is planned after training has changed the RMS of the weight."""
    torch.manual_seed(0)
    model, x = unit_scale(make()), torch.randn(32, 8)
    optimizer = uu.optim.AdamW(model.parameters(), lr=1.0)
    for seed in range(12):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        (model(x) - 5).square().mean().backward()
        optimizer.step()
    torch.manual_seed(0)
    wanted = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(model.eval()(x), wanted)


class Gated(nn.Module):
    """A function of small vectors, which no norm or layer has, and what it computes beside it."""

    def __init__(self, function: Function, behind: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.behind = function, behind
        self.p, self.q = (nn.Parameter(torch.randn(8) / 8) for _ in range(2))
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.double()
        self.register_buffer("x", torch.randn(32, 8, dtype=torch.float64))

    def forward(self) -> tuple[Tensor, Tensor]:
        given = self.layer(self.x)
        if self.behind:
            given = self.head(F.silu(given))
        gate, y = self.function(given, self.p, self.q)
        return gate, y if self.behind else self.head(y)


GATES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "differential": lambda h, p, q: ((g := (p * q).sum().exp()), torch.tanh(h) - g * h),
    "sigmoid": lambda h, p, q: ((g := p.sigmoid()), g * h),
    "one": lambda h, p, q: ((g := 1 + p), g * h),
}


@pytest.mark.parametrize("behind", [False, True], ids=["between layers", "behind them"])
@pytest.mark.parametrize("name", GATES)
def test_small_vectors_mean_what_they_meant(name: str, behind: bool) -> None:
    """Gains are brought to RMS 1 where they multiply values, not in formulas of their own."""
    plain = Gated(GATES[name], behind)
    model = unit_scale(plain)
    assert [row.done for row in uu.report(model) if row.call == "p"] == ["unit scale"]
    torch.testing.assert_close(model()[0], plain()[0])
    check_true(model, lambda m: m()[1].square().mean())
    check_slopes(model, lambda m: m()[1].square().mean())


def test_a_small_vector_that_is_added_keeps_its_share() -> None:
    model = unit_scale(Gated(lambda h, p, q: (p, h + p), behind=False))
    check_slopes(model, lambda m: m()[1].square().mean())
    (row,) = (row for row in uu.report(model) if row.call == "add")
    assert row.why.startswith("terms keep their shares, ")
