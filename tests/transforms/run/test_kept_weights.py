"""Weights that keep their values, as calls read them that are no products: they are cast at scales
of their own, and move as others of RMS 1 do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
from tests.transforms.models import Net
from unit_scaling.parameter import tag
from unit_scaling.transforms import unit_scale


def unit_weight(model: nn.Module, name: str) -> Tensor:
    """The weight as the recipe "unit" casts it."""
    p: Any = model.get_parameter(name)
    assert 0.7 < (p.square().mean().sqrt() / p.mup_scale).item() < 1.42
    return fp8.quantize(p, "e4m3", scale=p.mup_scale)


WEIGHT = fp8.Recipe(name="weight", input=fp8.Cast(format="e4m3"), weight=fp8.Cast(format="e4m3"))

PRODUCTS: dict[str, tuple[nn.Module, Callable[[Any, Tensor], Tensor]]] = {
    "linear": (nn.Linear(16, 16), lambda m, x: m.layer(x)),
    "conv": (nn.Conv1d(4, 16, 3), lambda m, x: m.layer(x.reshape(-1, 4, 4))),
    "matmul": (nn.Linear(16, 16), lambda m, x: x @ m.layer.weight.t()),
    "einsum": (nn.Linear(16, 16), lambda m, x: torch.einsum("bi,oi->bo", x, m.layer.weight)),
    "addmm": (
        nn.Linear(16, 16),
        lambda m, x: torch.addmm(m.layer.bias, x, m.layer.weight.transpose(0, 1)),
    ),
    "part": (nn.Linear(16, 32), lambda m, x: F.linear(x, m.layer.weight.chunk(2)[1])),
}

COMPILED = ("linear", "conv", "part")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in PRODUCTS), *((name, True) for name in COMPILED)],
)
def test_weights_are_cast_at_their_own_scale(name, compiled):
    """However a product is written, and whatever view of the weight is in it: the result is that of
    the rounded weight, and the input of RMS 1 is rounded as it is."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, forward = PRODUCTS[name]
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.normal_().mul_(2.0**-11)
        layer.bias.zero_()
    x = fp8.quantize(torch.randn(8, 16), "e4m3")
    plain = Net(lambda m, x: forward(m, x) + 0.0 * m.layer.weight.abs().amax(), layer=layer)
    model = unit_scale(plain)
    torch.testing.assert_close(model(x), plain(x))  # and is recorded
    expected = copy.deepcopy(plain)
    with torch.no_grad():
        expected.layer.weight.copy_(unit_weight(model, "layer.weight"))

    def call(x: Tensor) -> Tensor:
        with fp8.autocast(WEIGHT):
            return model(x)

    got = torch.compile(call, backend="eager")(x) if compiled else call(x)
    torch.testing.assert_close(got, expected(x), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(got, plain(x), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (uu.optim.AdamW, {"weight_decay": 1e-3, "eps": 1e-30}),
        (uu.optim.Adam, {"eps": 1e-30}),
        (uu.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}),
    ],
)
def test_steps_are_those_of_weights_at_unit_scale(cls, settings):
    """w = f u moves as u, an independent weight of RMS 1 with the learning rate of its rule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8)).double()
    scales = [2.0**-i for i in range(2, 6)]
    u = []
    for p, f in zip(model.parameters(), scales, strict=True):
        kind = "weight" if p.dim() > 1 else "bias"
        tag(p, kind, mup_scale=f)
        u.append(uu.Parameter(p.detach() / f, kind))
    x, y = torch.randn(2, 16, 64, dtype=torch.float64)
    ours, theirs = cls(model.parameters(), lr=0.1, **settings), cls(u, lr=0.1, **settings)

    def grads(weights: list[Tensor]) -> tuple[Tensor, ...]:
        hidden = F.gelu(F.linear(x, *weights[:2]))
        return torch.autograd.grad((F.linear(hidden, *weights[2:]) - y[:, :8]).square().sum(), u)

    for _ in range(3):
        ours.zero_grad()
        (model(x) - y[:, :8]).square().sum().backward()
        for q, g in zip(u, grads([f * q for f, q in zip(scales, u, strict=True)]), strict=True):
            q.grad = g
        ours.step()
        theirs.step()
    for p, q, f in zip(model.parameters(), u, scales, strict=True):
        torch.testing.assert_close(p.detach(), f * q.detach(), rtol=1e-6, atol=1e-9)
