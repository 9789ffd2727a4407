"""Operands of products that are far from RMS 1 get a power of two, and the values stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import check_true
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.measure import gauge


class Layers(nn.Module):
    """A layer with a bias that reads values of any size, and one behind it."""

    def __init__(self, first: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.last = first, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.silu(self.first(x)).flatten(1))
        return y


class Decayed(nn.Module):
    """A product of values that a formula of matrices keeps, as in a delta rule."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        key = F.normalize(self.key(x), dim=-1) / 8
        inverse = torch.eye(x.shape[1]) - key @ key.mT
        y: Tensor = self.last(inverse @ self.value(x))
        return y


class Spectral(nn.Module):
    """A product of complex numbers, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(3, 8), nn.Linear(8, 4)
        self.modes = nn.Parameter(torch.randn(8, 8, 5, dtype=torch.complex64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.up(x).mT, norm="forward")
        mixed = torch.einsum("nik,iok->nok", modes, self.modes)
        y: Tensor = self.last(torch.fft.irfft(mixed, norm="forward").mT)
        return y


LAYERS = {
    "linear": (lambda: Layers(nn.Linear(8, 8), 8), (64, 8)),
    "conv1d": (lambda: Layers(nn.Conv1d(3, 4, 3), 24), (64, 3, 8)),
    "conv2d": (lambda: Layers(nn.Conv2d(3, 4, 3), 16), (64, 3, 4, 4)),
    "formula": (Decayed, (16, 6, 8)),
    "complex": (Spectral, (16, 8, 3)),
}


def stepped(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients after a first step, with biases that are not zero."""
    model(x).square().mean().backward()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.zero_grad()
    output = model(x)
    output.square().mean().backward()
    return output, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("size", [1e-3, 300.0])
@pytest.mark.parametrize("name", LAYERS)
def test_values_stay(name: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are those without such factors, to the bit, and gradients up to a power of two."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    plain, x = make(), size * torch.randn(shape)
    model = unit_scale(plain)
    output, gradients = stepped(model, x)
    steps = [step for plan in uu.plan(model).plans.values() for step in plan.steps.values()]
    assert any(step is not None and step.slots for step in steps)
    monkeypatch.setattr(gauge, "_scale_operands", lambda *_: None)
    expected, others = stepped(unit_scale(copy.deepcopy(plain)), x)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients, others, strict=True):
        exponent = torch.log2(one.norm() / other.norm()).round()
        torch.testing.assert_close(one, other * 2**exponent, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_operands_are_inside(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, x = unit_scale(make()), torch.randn(shape) / 100
    found = uu.verify(model, x, loss=lambda y: y.square().mean())
    assert found.share("activation") == 1


def test_factors_of_the_first_form_hold_for_others() -> None:
    """Casts read the same operands in evaluation as in training, however weights have grown."""
    torch.manual_seed(0)
    model, x = unit_scale(Layers(nn.Linear(8, 8), 8)), torch.randn(64, 8)
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(16)
        model.eval()(x)
    trained, evaluated = uu.plan(model).plans.values()
    assert trained.operands == evaluated.operands
    again = uu.plan(unit_scale(Layers(nn.Linear(8, 8), 8), plan=uu.plan(model)))
    assert [plan.operands for plan in again.plans.values()] == [trained.operands] * 2
    uu.recalibrate(model.train(), x, loss=lambda y: y.square().mean())
    (anew,) = uu.plan(model).plans.values()
    assert anew.operands != trained.operands


class Chunk(nn.Module):
    """A chunk of a state space model, as the reference of Mamba-2 writes it: two products and a
    gate in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.last = nn.Linear(8, 32), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        c, b, a, values = self.within(x).chunk(4, -1)
        decay = torch.sigmoid(a[..., :1] + torch.zeros(x.shape[1])).tril()
        y: Tensor = torch.einsum("bln,bsn,bls,bsp->blp", c, b, decay, values)
        return (self.last(y) * y[..., :4]).square().mean()


def test_products_within_an_einsum() -> None:
    """Of three operands or more it is products of two, each with a factor and a gauge."""
    torch.manual_seed(0)
    plain, x = Chunk().double(), torch.randn(16, 12, 8, dtype=torch.float64)
    model = unit_scale(plain)
    assert check_true(model, lambda m: m(x))
    found = uu.verify(model, x)
    assert found.share("activation") == found.share("gradient") == 1
    assert sum(row.call == "einsum" and row.tensor == "output" for row in found) == 3
    kept = unit_scale(plain, init="preserve")
    assert torch.equal(kept(x), plain(x))


def test_the_products_of_an_einsum_have_factors_of_their_own():
    """They stand at one place of the code, as the iterations of a loop do, but are two calls."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x).exp(), self.k(x).exp(), self.v(x)
            context = torch.einsum("bnd,bne->bde", k, v)
            inverse = 1 / torch.einsum("bnd,bd->bn", q, k.sum(1))
            return self.out(torch.einsum("bnd,bde,bn->bne", q, context, inverse))

    torch.manual_seed(0)
    model, x, seen = unit_scale(Average()), torch.randn(4, 64, 32), []
    model.out.register_forward_hook(lambda _, given, output: seen.append(given[0]))
    for _ in range(2):
        y = model(x)
        y.backward(torch.randn_like(y))
    assert 0.5 < seen[-1].square().mean().sqrt() < 2
