"""Inputs that are a subclass of Tensor, as those of MONAI and torchvision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.transforms.gradients import gradients
from tests.transforms.models import KINDS
from unit_scaling.transforms import simulate_fp8, unit_scale


class Image(Tensor):
    """Results have its class."""

    def new_empty(self, size: tuple[int, ...], **options: object) -> Tensor:
        return self.as_subclass(Tensor).new_empty(size=size, **options)


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("name", ["ResNet", "ConvNeXt"])
def test_as_with_plain_tensors(name: str, init: str, simulated: bool) -> None:
    """Values and gradients are the same, and what follows may write into a result. In float64, as
    sums of convolutions depend on where their operands lie in memory."""

    def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        output = model(x.clone())
        assert type(output) is type(x)
        return output.as_subclass(Tensor).square().mean()

    x, steps = KINDS[name].batch(), []
    for each in (x, x.as_subclass(Image)):
        torch.manual_seed(0)
        model = unit_scale(KINDS[name].make().double(), init=init)
        model = simulate_fp8(model) if simulated else model
        steps.append([gradients(model, lambda m, x=each: loss(m, x)) for _ in range(3)])
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-9, atol=1e-12)
