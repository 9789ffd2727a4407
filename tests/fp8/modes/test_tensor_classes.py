"""Tensors of a class of their own, as libraries of images have: results have the class too."""

import pytest
import torch
from torch import Tensor, nn

import fp8
from unit_scaling.transforms import simulate_fp8, unit_scale


class Image(Tensor):
    """A class that torch's own functions keep; as those of MONAI, with a method of its own."""

    def new_empty(self, size, **options):
        return self.as_subclass(Tensor).new_empty(size=size, **options)


WAYS = {
    "convert": lambda model: fp8.convert(model, "mxfp8"),
    "calibrated": lambda model: fp8.convert(model, "static"),
    "both": lambda model: simulate_fp8(unit_scale(model)),
}


@pytest.mark.parametrize("way", WAYS)
def test_models_compute_the_same_and_results_have_the_class(way):
    found, x = [], torch.randn(8, 16)
    for given in (x, x.as_subclass(Image)):
        torch.manual_seed(0)
        model = WAYS[way](
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
        )
        y = model(given.requires_grad_())
        y.backward(torch.ones(8, 16))
        found.append([y, given.grad, *(p.grad for p in model.parameters())])
    assert type(found[1][0]) is Image
    for got, want in zip(*reversed(found), strict=True):
        assert torch.equal(got.as_subclass(Tensor), want)
