"""Batch norms make gradients grow; at cut edges that is taken back."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import unit_scale

CHANNELS = 32


def layer(stride: int = 1, width: int = 3) -> nn.Sequential:
    conv = nn.Conv2d(CHANNELS, CHANNELS, width, stride, width // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(CHANNELS))


class Chain(nn.Module):
    """Layers one after another; pool: the first is followed by a max pooling."""

    def __init__(self, depth: int, pool: bool = False, activation: str = "relu") -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.pool, self.activation = pool, getattr(F, activation)

    def forward(self, x: Tensor) -> Tensor:
        for i, each in enumerate(self.layers):
            x = self.activation(each(x))
            if self.pool and not i:
                x = F.max_pool2d(x, 3, 2, 1)
        return x


class Blocks(nn.Module):
    """Residual blocks of two layers with a ReLU after each add, the middle one of stride 2.

    gated: a factor in each branch depends on the values, as in squeeze and excitation.
    """

    def __init__(self, depth: int, gated: bool = False) -> None:
        super().__init__()
        strides = [2 if i == depth // 2 else 1 for i in range(depth)]
        self.stem, self.gated = layer(), gated
        self.first = nn.ModuleList(layer(stride) for stride in strides)
        self.second = nn.ModuleList(layer() for _ in strides)
        self.short = nn.ModuleList(layer(2, 1) if s == 2 else nn.Identity() for s in strides)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for first, second, short in zip(self.first, self.second, self.short, strict=True):
            y = second(F.relu(first(x)))
            x = F.relu(short(x) + (y * y.mean((2, 3), keepdim=True).sigmoid() if self.gated else y))
        return x


def batch() -> Tensor:
    return torch.randn(8, CHANNELS, 16, 16)


def taken_back(model: nn.Module, x: Tensor) -> list[str]:
    model(x)
    return [row.why.partition("divided by ")[2] for row in uu.report(model) if "norms" in row.why]


MODELS = {
    "chain": lambda: Chain(8),
    "chain, silu": lambda: Chain(8, activation="silu"),
    "chain, pool": lambda: Chain(4, pool=True),
    "blocks": lambda: Blocks(12),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_do_not_grow(name: str) -> None:
    """Within a factor of 2 each; a chain of 8 would reach (pi/(pi - 1))^4 = 4.6."""
    torch.manual_seed(0)
    rows = uu.verify(unit_scale(MODELS[name]()), batch()).rows
    gradients = {r.path: r.rms for r in rows if r.tensor == "gradient of output"}
    assert len(gradients) >= 4
    assert all(0.5 <= rms <= 2 for rms in gradients.values()), gradients


def test_the_factor_of_a_relu() -> None:
    torch.manual_seed(0)
    found = taken_back(unit_scale(Chain(3)), batch())
    assert found == [f"{(1 - 1 / math.pi) ** -0.5:.3g} for batch norms"] * 2


def test_a_call_that_is_not_known_ends_it() -> None:
    torch.manual_seed(0)
    ours = unit_scale(Blocks(3, gated=True))
    assert not taken_back(ours, batch())


def test_the_function_and_the_direction_of_its_gradients_stay() -> None:
    """A chain of batch norms computes the same whatever the scale of its weights."""
    torch.manual_seed(0)
    model, x = Chain(4).double(), batch().double()
    ours = unit_scale(copy.deepcopy(model))
    ratios = []
    for each in (model, ours):
        y = each(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        ratios.append(y)
    torch.testing.assert_close(
        F.normalize(ratios[0], dim=0), F.normalize(ratios[1], dim=0), rtol=1e-3, atol=1e-4
    )
    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        if a.dim() > 1:
            cosine = F.cosine_similarity(a.grad.flatten(), b.grad.flatten(), dim=0)
            assert cosine > 0.9999


class Ending(nn.Module):
    """A model that ends with a skip connection around a branch with a batch norm."""

    def __init__(self, before: list[str], branch: list[str], swapped: bool) -> None:
        super().__init__()
        made = {
            "linear": lambda: nn.Linear(CHANNELS, CHANNELS),
            "norm": lambda: nn.BatchNorm1d(CHANNELS),
            "relu": nn.ReLU,
        }
        self.before = nn.Sequential(*[made[name]() for name in before])
        self.branch = nn.Sequential(*[made[name]() for name in branch])
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.branch(x) + x if self.swapped else x + self.branch(x)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("branch", ["linear norm", "norm relu", "linear norm relu", "relu norm"])
@pytest.mark.parametrize("before", ["linear", "linear relu", "norm linear", "linear norm"])
def test_a_skip_connection_around_batch_norms_may_end_a_model(
    before: str, branch: str, swapped: bool
):
    torch.manual_seed(0)
    model = unit_scale(Ending(before.split(), branch.split(), swapped))
    y = model(torch.randn(64, CHANNELS))
    y.backward(torch.randn_like(y))
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
    assert 1 / 4 < y.square().mean().sqrt() < 4
