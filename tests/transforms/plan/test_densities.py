"""What is inside a distribution keeps its values: a density is that of the sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.transforms.gradients import check_true
from unit_scaling.transforms import unit_scale


class Stretched(torch.distributions.Transform):
    """A transform of a library: the calls are in its file, not in torch's."""

    domain = codomain = torch.distributions.constraints.real
    bijective = True

    def __init__(self, shift: Tensor, size: Tensor) -> None:
        super().__init__()
        self.shift, self.size = shift, size

    def call_and_ladj(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = x * self.size.exp() + self.shift
        return y, self.size.sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(x.shape[:-1])
        for net in self.nets:
            given, rest = x.chunk(2, -1)
            rest, ladj = Stretched(*net(given).chunk(2, -1)).call_and_ladj(rest)
            x, total = torch.cat([rest, given], -1), total + ladj
        return x, total


def test_a_transform_of_distributions_keeps_its_values() -> None:
    """Else the density of its result would not be that of the sample."""
    torch.manual_seed(0)
    flow = unit_scale(Flow()).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    with torch.no_grad():
        columns = [(flow(x + d)[0] - flow(x - d)[0]) / 2e-5 for d in 1e-5 * torch.eye(4).double()]
        ladj = torch.linalg.slogdet(torch.stack(columns, -1)).logabsdet
    # central differences: an error of 1e-10 of the step, and 1e-16 / 1e-5 of rounding
    torch.testing.assert_close(flow(x)[1], ladj, rtol=0, atol=1e-7)
    check_true(flow, lambda model: model(x)[1].sum() + model(x)[0].square().sum())
