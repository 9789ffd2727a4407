"""Objects among the arguments of a model that hold tensors with gradients: a cache of keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.transforms.gradients import check_true, without_gauges
from unit_scaling.transforms import unit_scale

WIDTH = 16


class Cache:
    """Of no kind that anyone knows."""

    def __init__(self, keys: Tensor) -> None:
        self.layers = [{"keys": keys}]

    def update(self, keys: Tensor) -> Tensor:
        self.layers[0]["keys"] = torch.cat([self.layers[0]["keys"], keys], 1)
        return self.layers[0]["keys"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.key = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        h = self.up(x).relu()
        keys = cache.update(self.key(h))
        return self.head(torch.softmax(h @ keys.mT, -1) @ keys.tanh())


class Choosing(Attention):
    """The number of its calls depends on values."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        y = super().forward(x, cache)
        return self.head(self.up(x).tanh()) + y.exp() if x.mean() > 0 else y.sin()


def segments(model: nn.Module) -> Tensor:
    """The second of two runs reads what the first one has kept."""
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([x[:, :3].abs(), -x[:, 3:].abs()], 1)
    cache = Cache(torch.zeros(4, 0, WIDTH, dtype=torch.float64))
    first, second = (model(part, cache) for part in x.split(3, 1))
    return 30 * second.square().mean() + first.mean()


def of_keys(model: nn.Module, keys: Tensor, shift: float = 0) -> Tensor:
    """The gradient of keys that are given."""
    keys = keys.clone().requires_grad_()
    x = torch.ones(4, 3, 8, dtype=torch.float64) + shift
    (1000 * model(x, Cache(keys)).square().mean()).backward()
    assert keys.grad is not None
    return keys.grad


MODELS: dict[str, Callable[[], nn.Module]] = {"fixed": Attention, "varying": Choosing}


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_through_a_cache_are_true(name: str, init: str) -> None:
    torch.manual_seed(0)
    model = unit_scale(MODELS[name]().double(), init=init)
    segments(model).backward()
    found = check_true(model, segments)
    assert found.keys() >= {"up.weight", "key.weight", "head.weight"}


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("name", MODELS)
def test_what_an_object_holds_gets_its_true_gradient(name: str, init: str) -> None:
    torch.manual_seed(0)
    model = unit_scale(MODELS[name]().double(), init=init)
    keys = torch.randn(4, 2, WIDTH, dtype=torch.float64)
    for shift in (0.0, -2.0, 0.0, 0.0, -2.0, -2.0, 0.0):
        ours = of_keys(model, keys, shift)
    true = of_keys(without_gauges(model), keys)
    torch.testing.assert_close(ours, true, rtol=1e-12, atol=0)


def test_a_run_that_misses_the_plan_starts_again_from_the_same_arguments() -> None:
    """As unit_scale looks at the branch that the model takes, the call has begun already."""
    torch.manual_seed(0)
    plain = Choosing().double()
    model = unit_scale(plain, init="preserve")
    for part in (torch.ones(4, 3, 8), -torch.ones(4, 3, 8), torch.ones(4, 3, 8)):
        caches = [Cache(torch.zeros(4, 0, WIDTH, dtype=torch.float64)) for _ in range(2)]
        results = [m(part.double(), cache) for m, cache in zip((plain, model), caches, strict=True)]
        assert torch.equal(*results)
        assert torch.equal(*(cache.layers[0]["keys"] for cache in caches))


def test_a_run_that_misses_the_plan_draws_the_same_numbers_again() -> None:
    class Dropping(Choosing):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            return super().forward(nn.functional.dropout(x), cache)

    torch.manual_seed(0)
    plain = Dropping().double()
    model = unit_scale(plain, init="preserve")
    for part in (torch.ones(4, 3, 8), -torch.ones(4, 3, 8), torch.ones(4, 3, 8)):
        results = []
        for each in (plain, model):
            torch.manual_seed(1)
            cache = Cache(torch.zeros(4, 0, WIDTH, dtype=torch.float64))
            results.append((each(part.double(), cache), torch.rand(1)))
        assert all(map(torch.equal, *results))
