"""Formulas that are spelled out call by call run as they are, and are scaled as a whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import exponent
from unit_scaling.transforms import unit_scale

WIDTH = 64


class Formula(nn.Module):
    """A function of the output of a layer, which another layer reads."""

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

PATTERNS = {
    "rms norm": rms_norm,
    "layer norm": layer_norm,
    "softmax": softmax,
    "rotary": rotary,
    "interleaved rotary": interleaved_rotary,
    "unit vectors": lambda m, x: x / x.norm(dim=-1, keepdim=True),
}


def model(fn, width: int = WIDTH, out: int = WIDTH) -> nn.Module:
    """out: the width of what the formula gives."""
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, width, bias=False), nn.Linear(out, WIDTH)
    return unit_scale(nn.Sequential(first, Formula(fn), last))


def run(ours: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The input and the result of the formula, with gradients of a loss like noise."""
    seen: list[Tensor] = []
    ours(x)
    hook = ours[1].register_forward_hook(lambda module, args, y: seen.extend((args[0], y)))
    result = ours(x)
    hook.remove()
    h, y = seen
    h.retain_grad()
    y.retain_grad()
    result.backward(torch.randn(result.shape))
    return h, y


def rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def parallel(ours: Tensor, plain: Tensor) -> None:
    """Whether one is the other times a positive number, to rounding."""
    a, b = ours.detach().double(), plain.detach().double()
    torch.testing.assert_close(a / rms(a), b / rms(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*FORMULAS, *PATTERNS])
def test_a_unit_is_the_formula_times_a_factor(name: str) -> None:
    """Its gradient is that of what it computes, times a power of two."""
    fn = FORMULAS.get(name) or PATTERNS[name]
    ours = model(fn)
    h, y = run(ours, torch.randn(4, 256, WIDTH))
    plain_input = h.detach().clone().requires_grad_()
    plain = fn(ours[1], plain_input)
    parallel(y, plain)
    if name in FORMULAS:  # by the law of large numbers within 1 %
        assert rms(y) == pytest.approx(1, rel=0.02)
    else:  # measured: the nearest power of two
        assert 2**-0.5 <= rms(y) <= 2**0.5
    plain.backward(y.grad * (rms(y) / rms(plain)))
    exponent(h.grad.double(), plain_input.grad.double(), rtol=1e-5)


@pytest.mark.parametrize("name", [*FORMULAS, *PATTERNS])
def test_the_report_names_the_unit(name: str) -> None:
    ours = model(FORMULAS.get(name) or PATTERNS[name])
    ours(torch.randn(4, 256, WIDTH))
    kind = "formula" if name in FORMULAS else "pattern"
    rows = [row for row in uu.report(ours) if row.path == "1"]
    named = [row.why.partition("result of a ")[2] for row in rows if "result of a" in row.why]
    assert [what.partition(" of ")[0] for what in named] == [kind]
    assert not [row for row in rows if row.call == "add" and "residual" in row.why]
    assert not [row for row in rows if row.left_alone]


def test_a_formula_after_the_last_layer_keeps_its_values() -> None:
    """So does one before the first: nothing of it goes from a layer to a layer."""
    ends = nn.Sequential(Formula(FORMULAS["quick gelu"]), nn.Linear(WIDTH, WIDTH), Formula(softmax))
    ours = unit_scale(ends)
    x = torch.randn(8, WIDTH)
    seen = []
    ours[1].register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    result = ours(x)
    for given, got in ((x, seen[-1][0]), (seen[-1][1], result)):
        fn = FORMULAS["quick gelu"] if given is x else softmax
        torch.testing.assert_close(got, fn(ours[0], given), rtol=0, atol=0)
    done = {row.done for row in uu.report(ours) if row.path in ("0", "2") and row.call != "gain"}
    assert done == {"unchanged"}


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
def test_an_inverse_has_a_measured_factor(fn, call: str) -> None:
    """It has no second moment. It is no number that multiplies a value, either."""
    ours = model(fn)
    x = torch.randn(8, WIDTH)
    h, y = run(ours, x)
    power = exponent(y.double(), fn(None, h).double(), rtol=1e-6)
    assert 1 / 2 < rms(y) < 2
    assert power < -1
    (row,) = [row for row in uu.report(ours) if row.path == "1" and row.call == call]
    assert row.done == "measured"
    assert row.why.endswith(f"measured: times {2.0**power:g}")
    with pytest.raises(ValueError, match=call):
        unit_scale(nn.Sequential(nn.Linear(8, 8), Formula(fn), nn.Linear(8, 8)), strict=True)(
            torch.randn(8, 8)
        )


def test_inverses_within_formulas() -> None:
    """One curve, a quotient, makes a formula; a quotient of two parts of a value is a pattern."""
    _, y = run(model(lambda m, x: 1 / (5 + 0.1 * x.clamp(-3, 3)) + 1), torch.randn(512, WIDTH))
    assert rms(y) == pytest.approx(1, rel=0.06)
    ratio = model(lambda m, x: x[..., ::2] / (3 + x[..., 1::2].sigmoid()), out=WIDTH // 2)
    h, y = run(ratio, torch.randn(512, WIDTH))
    parallel(y, h[..., ::2] / (3 + h[..., 1::2].sigmoid()))
    assert 2**-0.5 <= rms(y) <= 2**0.5


def test_two_values_are_no_formula() -> None:
    """A gate and what it gates come from different parts of one call."""
    ours = model(lambda m, x: gate(*x.chunk(2, -1)), width=2 * WIDTH)
    _, y = run(ours, torch.randn(64, WIDTH))
    assert not [row for row in uu.report(ours) if "formula of" in row.why]
    assert rms(y) == pytest.approx(1, rel=0.1)


def gate(a: Tensor, b: Tensor) -> Tensor:
    return a * F.silu(b)


def test_gains_and_biases_collect_unit_gradients() -> None:
    ours = model(lambda m, x: x * m.gain + m.gain)
    run(ours, torch.randn(4096, WIDTH))
    assert 1 / 2 < rms(ours[1].gain.grad) < 3  # two terms, of one weight


def test_a_small_gain_starts_at_one() -> None:
    layer = Formula(lambda m, x: m.gain * x)
    nn.init.constant_(layer.gain, 1e-6)
    ours = unit_scale(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer))
    assert torch.equal(ours[1].gain, torch.ones(WIDTH))
    assert torch.equal(unit_scale(layer, init="preserve").gain, layer.gain)
