"""The order in which a product is multiplied by its two scales."""

import dataclasses

import torch
from torch import nn

import fp8
from fp8.lab.parity.certify import certify
from fp8.lab.parity.devices import Devices
from fp8.lab.parity.engines import ENGINES
from fp8.lab.parity.epilogue import set_epilogue
from fp8.lab.parity.sides import set_sums
from tests.fp8.lab.test_certify import family
from tests.fp8.lab.test_engines import vllm_token
from tests.shared import assert_same, parametrize, refuses, seeded

IN, OUT = 256, 1024
WEIGHT = dataclasses.replace(ENGINES["vllm_row"], epilogue="weight")


def layer_of(recipe, bias=False, sums="exact"):
    layer = nn.Linear(IN, OUT, bias, dtype=torch.bfloat16)
    for p in layer.parameters():
        nn.init.normal_(p, generator=seeded(1))
    set_sums(fp8.convert(layer, recipe), sums)
    return layer.requires_grad_(False)


def inputs():
    return torch.randn(4, 512, IN, generator=seeded(0)).bfloat16()


def test_the_scale_of_the_weight_comes_first():
    """As in the epilogue of vLLM (scaled_mm_epilogues_c3x.hpp); 4 of a million results differ."""
    x, layer = inputs(), layer_of("row_exact")
    a, of_x = vllm_token(x.float().flatten(0, 1))
    b, of_weight = vllm_token(layer.weight.float())
    products = (a.double() @ b.double().mT).float()
    before = layer(x)
    assert_same(before.flatten(0, 1), (of_weight.mT * (of_x * products)).bfloat16())
    set_epilogue(layer, "weight")
    found = layer(x)
    assert_same(found.flatten(0, 1), (of_x * (of_weight.mT * products)).bfloat16())
    share = float((found != before).double().mean())
    assert 1e-6 < share < 1e-5


@parametrize("bias", [False, True])
def test_a_static_scale_a_bias_and_devices(bias):
    """By powers of two the order has no effect, and a layer is otherwise as before."""
    x, layer = inputs()[:1], layer_of("static", bias)
    fp8.calibrate(layer, x, lambda y: y.float().square().mean())
    before = layer(x)
    Devices(2, ("",), "once").share(layer)
    shared = layer(x)
    layer = layer_of("static", bias)
    fp8.calibrate(layer, x, lambda y: y.float().square().mean())
    set_epilogue(layer, "weight")
    assert_same(layer(x), before)
    Devices(2, ("",), "once").share(layer)
    assert_same(layer(x), shared)


@parametrize("recipe, sums", [("block_exact", "exact"), ("row_exact", None)])
def test_products_without_an_order_stay(recipe, sums):
    x, layer = inputs()[:1], layer_of(recipe, sums=sums)
    before = layer(x)
    set_epilogue(layer, "weight")
    assert_same(layer(x), before)
    with refuses("did you mean 'weight'"):
        set_epilogue(layer, "weigth")


def test_a_certificate_finds_the_order():
    model, ids = family("llama")
    found = certify(model, ids, engine=WEIGHT)
    assert not found.ok
    assert 1e-3 < found.kl < 0.02
    assert "the engine's times the scale of the weight first" in str(found)
    for devices in (1, 2):
        both = {"train": WEIGHT, "rollout": WEIGHT, "bound": 0.0, "by_layer": False}
        shared = {"devices": devices, "train_devices": devices}
        assert fp8.parity(model, ids, **both, **shared, sums="exact").ok
