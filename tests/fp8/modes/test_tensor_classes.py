"""Tensors of a class of their own, as libraries of images have: results have the class too."""

import torch
from torch import Tensor, nn

import fp8
from tests.shared import pairs, parametrize
from tests.transforms.models import Image

WAYS = {
    "convert": lambda model: fp8.convert(model, "mxfp8"),
    "calibrated": lambda model: fp8.convert(model, "static"),
}


@parametrize("way", WAYS)
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
    for got, want in pairs(*reversed(found)):
        assert torch.equal(got.as_subclass(Tensor), want)
