"""Tags of modules that hold the weights of several experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unit_scaling.optim import lr_scale_func_adam
from unit_scaling.parameter import tag
from unit_scaling.transforms import unit_scale

EXPERTS, WIDTH, HIDDEN = 3, 16, 32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bk,ekn->ebn", x, self.up) + self.up_bias[:, None]
        return torch.einsum("ebn,enk->bk", F.relu(hidden), self.down)


@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_rates_are_those_of_one_expert(init):
    model = unit_scale(
        nn.Sequential(nn.Linear(8, WIDTH), Experts(), nn.Linear(WIDTH, 4)), init=init
    )
    experts, single = model[1], nn.Parameter(torch.empty(WIDTH, HIDDEN))
    tag(single, "weight", mup_scale=experts.up.mup_scale)
    assert experts.up.mup_stacked
    assert lr_scale_func_adam(experts.up) == lr_scale_func_adam(single)
    assert experts.up_bias.mup_type == "bias"
    assert not model[0].weight.mup_stacked
