"""What the errors of a loss have in common, its parts' sizes, and weights that are put together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import unit_scale


class Segments(nn.Module):
    """A class for each pixel, of features that are all positive."""

    def __init__(self, classes: int, last: int = 1) -> None:
        super().__init__()
        self.up, self.deep = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.ConvTranspose2d(16, classes, last, last)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = y.repeat_interleave(self.head.stride[0], 1).repeat_interleave(self.head.stride[1], 2)
        logits = self.head(F.relu(self.deep(F.relu(self.up(x)))))
        if logits.shape[1] > 1:
            return F.cross_entropy(logits, y)
        return F.binary_cross_entropy_with_logits(logits[:, 0], y.float())


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("classes", [1, 2, 8])
def test_errors_agree_as_the_outputs_do(classes: int, last: int) -> None:
    """The gradient of the head's weight sums over pixels: 2 to 6 times as large without that."""
    torch.manual_seed(0)
    model = unit_scale(Segments(classes, last))
    batch = torch.randn(4, 3, 16, 16), torch.randint(max(2, classes), (4, 16, 16))
    model(*batch)
    found = {
        r.path: r.rms for r in uu.verify(model, batch).rows if r.tensor == "gradient of weight"
    }
    assert 1 / 2.5 < found["head"] < 2.5
    assert any("positions agree" in row.why for row in uu.report(model) if row.path == "head")


class Policy(nn.Module):
    """Proximal policy optimization: a ratio of probabilities, an entropy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        self.critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, seen: Tensor, done: Tensor, gain: Tensor, before: Tensor) -> Tensor:
        logs = F.log_softmax(self.actor(seen), -1)
        ratio = (logs.gather(1, done[:, None])[:, 0] - before).exp()
        policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        return policy - 0.01 * entropy + 0.5 * (self.critic(seen)[:, 0] - gain).pow(2).mean()


def test_a_ratio_of_probabilities_is_near_one() -> None:
    """Its exponential is not that of a normal number, which would have a slope of e."""
    torch.manual_seed(0)
    batch = torch.randn(64, 8), torch.randint(4, (64,)), torch.randn(64), -torch.rand(64) - 1
    model = unit_scale(Policy())
    model(*batch)
    assert uu.verify(model, batch).share("gradient") == 1
    assert any("gradient times 64, as all of them" in row.why for row in uu.report(model))


def test_a_target_has_no_gradient_that_counts() -> None:
    """A box between 0 and 1 beside a class: the slope of the sigmoid is that of its part."""

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.kind, self.box = nn.Linear(8, 64), nn.Linear(64, 4), nn.Linear(64, 4)

        def forward(self, x: Tensor, kinds: Tensor, boxes: Tensor) -> Tensor:
            h = torch.tanh(self.up(x))
            loss = F.l1_loss(self.box(h).sigmoid(), boxes)
            return F.cross_entropy(self.kind(h), kinds) + 5 * loss

    torch.manual_seed(0)
    batch = torch.randn(20, 8), torch.randint(4, (20,)), torch.rand(20, 4)
    model = unit_scale(Boxes())
    model(*batch)
    rows = {(r.path, r.tensor): r.rms for r in uu.verify(model, batch).rows}
    assert 1 / 2 < rows["kind", "gradient of output"] < 2
    assert 1 / 2 < rows["box", "gradient of output"] < 2


@pytest.mark.parametrize("moved", [lambda w: w.t(), lambda w: w.view(64, 32), lambda w: w[:32].t()])
def test_a_weight_that_is_put_together_of_views_counts_as_one_of_unit_scale(moved) -> None:
    """As the decoder of MobileBERT: its table transposed, and more rows beneath."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.table = nn.Linear(16, 96), nn.Parameter(0.02 * torch.randn(32, 64))
            self.rest = nn.Parameter(0.02 * torch.randn(96, 64))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            top = moved(self.table)
            weight = torch.cat([top.reshape(-1, 64), self.rest[: 96 - top.numel() // 64]])
            return F.cross_entropy(F.layer_norm(self.up(x), (96,)) @ weight, y)

    torch.manual_seed(0)
    batch = torch.randn(256, 16), torch.randint(64, (256,))
    model = unit_scale(Head())
    model(*batch)
    rows = {(r.path, r.tensor): r.rms for r in uu.verify(model, batch).rows}
    assert abs(rows["", "other"] - 1) < 0.1
    assert abs(rows["up", "gradient of output"] - 1) < 0.3
