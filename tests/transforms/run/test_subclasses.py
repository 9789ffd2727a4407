"""Inputs that are a subclass of Tensor, as those of MONAI and torchvision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.transforms.gradients import check_true
from unit_scaling.transforms import simulate_fp8, unit_scale


class Image(Tensor):
    """Results have its class."""

    def new_empty(self, size: tuple[int, ...], **options: object) -> Tensor:
        return self.as_subclass(Tensor).new_empty(size=size, **options)


def model() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(0.1, inplace=True)]
    second = [nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(128, 4)]
    return nn.Sequential(*first, *second)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    assert type(output) is type(x)
    output = output.as_subclass(Tensor)
    nn.functional.cross_entropy(output, torch.arange(4)).backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("simulated", [False, True])
def test_as_with_plain_tensors(init: str, simulated: bool) -> None:
    """Values and gradients are the same, and what follows may write into a result. In float64, as
    sums of convolutions depend on where their operands lie in memory.
    """
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    found = []
    for given in (x, x.clone().as_subclass(Image)):
        scaled = unit_scale(model().double(), init=init)
        scaled = simulate_fp8(scaled) if simulated else scaled
        found.append([step(scaled, given.clone()) for _ in range(3)])
    for plain, image in zip(*found, strict=True):
        for a, b in zip(plain, image, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9 * a.abs().max().item())


def test_gradients_are_true() -> None:
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64).as_subclass(Image)
    scaled = unit_scale(model().double())
    check_true(scaled, lambda m: m(x.clone()).square().mean())
