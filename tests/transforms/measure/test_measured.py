"""The run that measures factors and gauges sees the model as the recording has seen it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.models import Net, batch, gpt
from unit_scaling.transforms import unit_scale

WELL = ["every tensor is in the range of its kind"]


class Cache:
    keys: Tensor | None = None


class Cached(nn.Module):
    """Another branch once it has run: of the cache that it is given, or of its own count."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.calls = own, 0
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        h = self.first(x)
        if cache.keys is not None:
            h = torch.cat([cache.keys, h], 1)
        if self.own and self.calls:
            h = h.tanh()
        self.calls += 1
        cache.keys = None if self.own else h
        return self.last(h)


@pytest.mark.parametrize("own", [False, True])
def test_what_the_recording_has_changed_is_not_seen(own: bool) -> None:
    torch.manual_seed(0)
    model, cache = unit_scale(Cached(own)), Cache()
    assert model(torch.randn(2, 4, 8), cache).shape == (2, 4, 8)
    assert model.calls == 1


def test_what_is_written_in_place_is_corrected_once() -> None:
    """Otherwise the calls after it are corrected for it as well."""
    torch.manual_seed(0)
    sums = Net(lambda m, x: (1.0 * x).cumsum_(-1))
    model = unit_scale(
        nn.Sequential(nn.Linear(64, 256), sums, nn.Linear(256, 64), nn.Linear(64, 8))
    )
    result = uu.verify(model, torch.randn(256, 64))
    assert result.diagnosis == WELL
    assert result.outside == []


@pytest.mark.parametrize("written", [torch.exp_, torch.relu_, torch.sigmoid_, torch.tanh_])
def test_what_is_written_in_place_has_gradients(written: Callable[[Tensor], Tensor]) -> None:
    """Of functions whose derivative is computed of their result."""
    torch.manual_seed(0)
    function = Net(lambda m, x: written(1.0 * x))
    model = unit_scale(nn.Sequential(nn.Linear(64, 64), function, nn.Linear(64, 64)))
    model(torch.randn(64, 64)).sum().backward()
    assert not [row for row in uu.report(model) if row.call == "backward"]
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_another_loss_of_the_logits_than_the_models_own() -> None:
    """Its gradient is as large as that of the loss that was measured: so are all others."""
    model = unit_scale(gpt())
    ids, targets = batch()
    loss = lambda o: F.cross_entropy(o[0].flatten(0, 1), targets.flatten())  # noqa: E731
    assert uu.verify(model, (ids, targets), loss=loss).diagnosis == WELL
    assert uu.verify(model, (ids, targets)).diagnosis == WELL


class Levels(nn.Module):
    """Returns a result that its later layers read too, which send it a gradient of 16 times the
    size of what arrives from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        level = self.first(x)
        return level, (16 * self.later(F.gelu(level))) ** 2


def test_what_arrives_at_a_result_is_apart_from_what_its_readers_send():
    torch.manual_seed(0)
    plain, x = Levels(), torch.randn(256, 64)
    model = unit_scale(plain)
    for _ in range(3):
        level, last = model(x)
        starts = [torch.randn_like(level), torch.randn_like(last)]
        torch.autograd.backward([level, last], starts)
        (plan,) = uu.plan(model).plans.values()
        assert plan.outside == 0
    assert uu.verify(model, x).share("gradient") == 1
