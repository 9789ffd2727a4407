"""Formulas that are spelled out call by call run as they are, and are scaled as a whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import unit_scale

WIDTH = 64


class Formula(nn.Module):
    """A function of the output of a layer, which keeps it from being the model's input."""

    def __init__(self, fn) -> None:
        super().__init__()
        self.fn = fn
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


def rms_norm(m: Formula, x: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    return m.gain * (x * torch.rsqrt(variance + 1e-6)).to(dtype)


def layer_norm(m: Formula, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    std = (x - mean).pow(2).mean(-1, keepdim=True).sqrt()
    return m.gain * (x - mean) / (std + 1e-6)


def softmax(m: Formula, x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def rotary(m: Formula, x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -(torch.arange(WIDTH) % 32 / 32)
    half = torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), dim=-1)
    return x * angles.cos() + half * angles.sin()


def interleaved_rotary(m: Formula, x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -(torch.arange(WIDTH // 2) / 32)
    a, b = x[..., ::2], x[..., 1::2]
    pair = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.stack(pair, dim=-1).flatten(-2)


C = math.sqrt(2 / math.pi)

FORMULAS = {
    "gelu by erf": lambda m, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu by tanh": lambda m, x: (
        0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "fast gelu": lambda m, x: 0.5 * x * (1.0 + torch.tanh(x * C * (1.0 + 0.044715 * x * x))),
    "quick gelu": lambda m, x: x * torch.sigmoid(1.702 * x),
    "mish": lambda m, x: x * torch.tanh(F.softplus(x)),
    "clipped gelu": lambda m, x: torch.clip(F.gelu(x), -10, 10),
    "squared relu": lambda m, x: torch.square(F.relu(x)),
    "erfc": lambda m, x: torch.erfc(x),
    "threshold": lambda m, x: F.threshold(x, 0.1, 0.0),
    "cumulative normal": lambda m, x: torch.special.ndtr(x),
    "sinc": lambda m, x: x * torch.sinc(x),
    "soft cap": lambda m, x: 50 * torch.tanh(x / 50),
}
"""Elementwise: factors by quadrature."""

UNITS = {
    "rms norm": (rms_norm, "norm"),
    "layer norm": (layer_norm, "norm"),
    "softmax": (softmax, "softmax"),
    "rotary": (rotary, "linear form"),
    "interleaved rotary": (interleaved_rotary, "linear form"),
    "unit vectors": (lambda m, x: x / x.norm(dim=-1, keepdim=True), "norm"),
}


def model(fn) -> nn.Module:
    torch.manual_seed(0)
    return unit_scale(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Formula(fn)))


def rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def parallel(ours: Tensor, plain: Tensor) -> None:
    """Whether one is the other times a positive number, to rounding."""
    a, b = ours.detach().double(), plain.detach().double()
    torch.testing.assert_close(a / rms(a), b / rms(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*FORMULAS, *UNITS])
def test_a_unit_is_the_formula_times_a_factor(name: str) -> None:
    fn = FORMULAS.get(name) or UNITS[name][0]
    ours = model(fn)
    x = torch.randn(4, 256, WIDTH)
    ours(x)
    h = ours[0](x).detach().requires_grad_()
    y = ours[1](h)
    plain_input = h.detach().clone().requires_grad_()
    plain = fn(ours[1], plain_input)
    parallel(y, plain)
    # By the law of large numbers within 1 %, but for the 5 % under which a factor is taken for 1.
    assert rms(y) == pytest.approx(1, rel=0.06)
    cotangent = torch.randn(y.shape)
    y.backward(cotangent)
    plain.backward(cotangent)
    parallel(h.grad, plain_input.grad)


@pytest.mark.parametrize("name", [*FORMULAS, *UNITS])
def test_the_report_names_the_unit(name: str) -> None:
    ours = model(FORMULAS.get(name) or UNITS[name][0])
    ours(torch.randn(4, 256, WIDTH))
    kind = "formula" if name in FORMULAS else UNITS[name][1]
    rows = [row for row in uu.report(ours) if row.path == "1"]
    assert kind in [row.why.partition(" of ")[0] for row in rows]
    assert not [row for row in rows if row.call == "add" and "residual" in row.why]
    assert not [row for row in rows if row.left_alone]


def test_a_formula_on_the_only_path_has_a_factor_for_the_gradient() -> None:
    """As an op without constraint: RMS 1 in both directions."""
    ours = model(FORMULAS["quick gelu"])
    x = torch.randn(64, 256, WIDTH)
    ours(x)
    h = torch.randn(64, 256, WIDTH, requires_grad=True)
    y = ours[1](h)
    y.backward(torch.randn(y.shape))
    assert rms(y) == pytest.approx(1, rel=0.01)
    assert rms(h.grad) == pytest.approx(1, rel=0.01)


def test_values_that_leave_a_formula_are_scaled_themselves() -> None:
    """A chain whose middle is used elsewhere is no unit."""
    ours = model(lambda m, x: (y := torch.tanh(x)).softmax(-1) + torch.expm1(y))
    ours(torch.randn(2, 8, WIDTH))
    rows = [row for row in uu.report(ours) if row.path == "1" and "formula" in row.why]
    assert [row.call for row in rows] == ["expm1"]


@pytest.mark.parametrize(
    ("fn", "call"),
    [(lambda m, x: 2 / x, "__rdiv__"), (lambda m, x: x.reciprocal(), "reciprocal")],
)
def test_an_inverse_has_no_factor(fn, call: str) -> None:
    """It has no second moment. It is no number that multiplies a value, either."""
    ours = model(fn)
    x = torch.randn(8, WIDTH)
    torch.testing.assert_close(ours(x), fn(None, ours[0](x)))
    assert [row.call for row in uu.report(ours).left_alone] == [call]


def test_inverses_within_formulas() -> None:
    """One curve, a quotient, makes a formula; a quotient of two values is not linear."""
    ours = model(lambda m, x: 1 / (5 + 0.1 * x.clamp(-3, 3)) + 1)
    assert rms(ours(torch.randn(512, WIDTH))) == pytest.approx(1, rel=0.06)
    ratio = model(lambda m, x: x[..., ::2] / (3 + x[..., 1::2].sigmoid()))
    ratio(torch.randn(8, WIDTH))
    assert not [row for row in uu.report(ratio) if "linear form" in row.why]


def test_two_values_are_no_formula() -> None:
    """A gate and what it gates come from different parts of one call."""
    gated = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    torch.manual_seed(0)
    ours = unit_scale(nn.Sequential(gated, Formula(lambda m, x: gate(*x.chunk(2, -1)))))
    y = ours(torch.randn(64, WIDTH))
    assert not [row for row in uu.report(ours) if "formula of" in row.why]
    assert rms(y) == pytest.approx(1, rel=0.1)


def gate(a: Tensor, b: Tensor) -> Tensor:
    return a * F.silu(b)


def test_gains_and_biases_collect_unit_gradients() -> None:
    ours = model(lambda m, x: x * m.gain + m.gain)
    y = ours(torch.randn(4096, WIDTH))
    y.backward(torch.randn(y.shape))
    assert 1 / 2 < rms(ours[1].gain.grad) < 3  # two terms, of one weight


def test_a_small_gain_starts_at_one() -> None:
    layer = Formula(lambda m, x: m.gain * x)
    nn.init.constant_(layer.gain, 1e-6)
    ours = unit_scale(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer))
    assert torch.equal(ours[1].gain, torch.ones(WIDTH))
    assert torch.equal(unit_scale(layer, init="preserve").gain, layer.gain)
