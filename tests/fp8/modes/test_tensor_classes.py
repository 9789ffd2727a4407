"""Tensors of a class of their own, as libraries of images have: results have the class too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8
from unit_scaling import functional as U
from unit_scaling.transforms import simulate_fp8, unit_scale


class Image(Tensor):
    """A class that torch's own functions keep; as those of MONAI, with a method of its own."""

    def new_empty(self, size: Any, **options: Any) -> Tensor:
        return self.as_subclass(Tensor).new_empty(size=size, **options)


class Tagged(Tensor):
    """A class that adds something to every result."""

    tag = ""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        tags = [x.tag for x in args if isinstance(x, cls)]
        if isinstance(result, cls) and tags:
            result.tag = tags[0]
        return result


def network() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16)]
    return nn.Sequential(*parts, nn.LeakyReLU(inplace=True))


WAYS = {
    "convert": lambda: fp8.convert(network(), "tensor"),
    "tiles": lambda: fp8.convert(network(), "mxfp8"),
    "calibrated": lambda: fp8.convert(network(), "static"),
    "unit_scale": lambda: unit_scale(network()),
    "both": lambda: simulate_fp8(unit_scale(network())),
    "after": lambda: unit_scale(simulate_fp8(network())),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Image, Tagged])
def test_models_compute_the_same_and_results_have_the_class(way: str, kind: Any):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for given in (x, x.as_subclass(kind)):
        model = WAYS[way]()
        if isinstance(given, Tagged):
            given.tag = "first"
        given.requires_grad_()
        y = model(given)
        y.backward(torch.ones(8, 16))
        found.append([y, given.grad, *(p.grad for p in model.parameters())])
    assert type(found[1][0]) is kind
    assert getattr(found[1][0], "tag", "first") == "first"
    for got, want in zip(*reversed(found), strict=True):
        assert torch.equal(got.as_subclass(Tensor), want)


def test_products_of_a_block_and_of_a_function():
    x, w = torch.randn(4, 8).as_subclass(Image), torch.randn(6, 8)
    with fp8.autocast("tensor"):
        results = [nn.functional.linear(x, w), x @ w.mT]
    assert [type(y) for y in (*results, U.linear(x, w, None))] == [Image] * 3
