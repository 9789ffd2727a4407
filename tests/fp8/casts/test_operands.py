"""Operands kept in bytes for the backward pass: how many, and that they come back to the bit."""

import copy
import dataclasses
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import RECIPES, Cast, Format, Recipe
from fp8.casts import casting, operands
from fp8.casts.operands import casts_of, token_of
from fp8.products import matmul
from fp8.products.matmul import linear
from tests.fp8.blocks import block, bytes_of, saved_by
from tests.fp8.products.test_matmul import DTYPES
from tests.shared import (
    assert_same,
    linears,
    normal,
    one_in,
    parametrize,
    randn,
    refuses,
    settle,
)
from unit_scaling.transforms import simulate_fp8

each_backend = parametrize("backend", ["simulate", "native"])


@parametrize("dtype", [torch.float32, torch.bfloat16])
@parametrize("name", ["unit", "tensor", "delayed"])
@parametrize("function", [linear, F.conv1d])
@each_backend
def test_operands_are_kept_in_bytes(backend, function, name, dtype):
    """A quarter of float32 and half of bfloat16, and as many bytes for the scales."""
    shapes = (
        ((32, 64, 8), (48, 64, 3)) if function is F.conv1d else ((64, 32), (48, 32))
    )
    x, w = (randn(*shape).to(dtype) for shape in shapes)

    def run():
        with block(name, backend):
            F.linear(x, w) if function is linear else function(x, w)

    assert bytes_of(saved_by(run)) <= x.numel() + w.numel() + 8
    with torch.no_grad():
        assert not saved_by(run)


@parametrize("rule", ["up", "exact"])
@parametrize("format", ["e4m3", "e5m2", "e4m3fnuz"])
@parametrize("dtype", DTYPES)
def test_what_was_in_bytes_is_the_same_to_the_bit(dtype, format, rule):
    """For every number of the format under a scale, NaN and Inf among them."""
    cast = Cast(format=format, scaling="tensor", rule=rule, overflow="nonfinite")
    codes = (
        torch.arange(256, dtype=torch.uint8).view(fp8.FORMATS[format].dtype).double()
    )
    x = (codes[codes.isfinite()] * 0.3).to(dtype).reshape(1, -1).requires_grad_()
    for extreme in ([], [float("nan")], [float("inf")]):
        a = torch.cat([x, torch.tensor([extreme], dtype=dtype)], dim=1)
        recipe = Recipe(name="one", input=cast)
        w = torch.ones(1, a.shape[1], dtype=dtype, requires_grad=True)
        (got,) = torch.autograd.grad(linear(a, w, recipe=recipe).sum(), w)
        assert_same(got, casting.cast_forward(a, cast), equal_nan=True)


@parametrize("again", [False, True])
@parametrize("name", ["tensor", "mxfp8"])
def test_a_second_derivative_reads_bytes_straight_through_their_casts(name, again):
    """torch.func keeps tensors: of products and of a convolution."""
    tensors = [normal(8, 4, 32), normal(8, 4, 3), normal(8, 32)]

    def function(x, kernel, w):
        with fp8.autocast(name):
            y = F.silu(F.conv1d(x, kernel, padding=1)) @ w.mT
        return y.square().sum()

    def checkpointed(*args):
        return (
            checkpoint(function, *args, use_reentrant=False)
            if again
            else function(*args)
        )

    def slope(*args):
        return torch.func.grad(function)(*args).square().sum()

    want = torch.func.grad(slope, argnums=(0, 1, 2))(*tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    with torch.autograd.graph.save_on_cpu():
        (first,) = torch.autograd.grad(
            checkpointed(*leaves), leaves[0], create_graph=True
        )
    assert_same(torch.autograd.grad(first.square().sum(), leaves), want)


@pytest.mark.native
def test_double_backward_of_kernels_is_refused():
    x, w = randn(16, 16), randn(16, 16)
    y = linear(x, w, recipe=RECIPES["unit"], backend="native")
    with refuses("create_graph=True: products of backend='native'", RuntimeError):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@each_backend
@parametrize("change", ["in place", "other part", "other recipe"])
def test_an_activation_that_changed_is_cast_again(change, backend):
    """Between two layers: each output and each gradient is that of the values which its own forward
    pass saw."""
    w, buffer = randn(16, 16), randn(32, 16) * 1.0
    x, recipe = buffer[:16], "unit"
    first, leaf = x.detach().clone(), x.detach()
    with fp8.autocast("unit", backend=backend):
        y = F.linear(x, w)
    if change == "in place":
        leaf.mul_(3.0)
    elif change == "other part":
        x = buffer[16:]
    else:
        recipe = "tensor"
    with fp8.autocast(recipe, backend=backend):
        again, want = F.linear(x, w), F.linear(x.detach().clone(), w)
    with fp8.autocast("unit", backend=backend):
        before = F.linear(first, w)
    for got, expected in ((again, want), (y, before)):
        assert_same(got, expected)
        (dw,), (other,) = (torch.autograd.grad(out.sum(), w) for out in (got, expected))
        assert_same(dw, other)


def count_of_objects():
    for _ in range(2):
        gc.collect()
    return len(gc.get_objects())


def converted(model):
    return fp8.convert(model, "tensor")


def recorded(model):
    with fp8.stats(fp8.convert(model, "mxfp8")):
        model(torch.ones(8, 32)).sum().backward()
    return model


@parametrize("copied", [simulate_fp8, converted, recorded])
@parametrize("kind", ["linear", "conv", "attention"])
def test_copies_of_a_model_leave_nothing(copied, kind):
    """No cache has a key of a single model: the names of products have numbers of recorders."""
    layers = {
        "linear": linears(32, 16, nn.GELU, 16),
        "conv": nn.Conv1d(8, 8, 3),
        "attention": nn.TransformerEncoderLayer(32, 2, 16, batch_first=True),
    }

    def run():
        copied(copy.deepcopy(layers[kind]))(torch.ones(8, 32)).sum().backward()

    for _ in range(5):
        run()
    before = count_of_objects()
    for _ in range(20):
        run()
    assert count_of_objects() - before < 20  # less than one each


def test_a_token_stands_for_the_casts_of_a_product():
    """Each field of a cast, and each option of the product."""
    mine = Format(name="mine", exponent_bits=3, mantissa_bits=1, bias=3, max=12.0)
    first = Cast(format=mine, scaling="delayed", history=3, margin=-1)
    turned = {"rounding": "stochastic", "hadamard": 16, "signs": "random"}
    second = Cast(format="e4m3", scaling="mx", rule="even", tile=(2, 4), **turned)
    again = {"grad_input_weight": second, "grad_weight_input": second}
    recipe = Recipe(name="token", input=first, grad=second, **again)
    layer, other, fixed = (
        casts_of(token_of(recipe.text, **options))
        for options in ({}, {"layer": False}, {"rotated": False})
    )
    assert sum(layer.pairs, ()) == recipe.casts
    assert other.b == first
    # Without a history.
    turned.pop("rounding")
    rotated = Cast(format=mine, scaling="tensor", margin=-1, **turned)
    assert other.b_for_grad_a == rotated
    assert fixed.grad_for_a == dataclasses.replace(second, hadamard=0, signs="fixed")
    assert fixed.a == first


def kept(function, x, net):
    """The gradients of x and the parameters, and the bytes that are saved besides the latter."""
    outputs = []
    saved = saved_by(lambda: outputs.append(function(x)))
    known = {p.data_ptr() for p in net.parameters()}
    size = bytes_of([t for t in saved if t.data_ptr() not in known])
    return torch.autograd.grad(outputs[0].square().sum(), [x, *net.parameters()]), size


@each_backend
@parametrize("recipe", ["tensor", "static", "unit", "row"])
def test_layers_that_read_one_input_share_its_cast(recipe, backend):
    """With the gradients of layers that do not, and no longer than the input lives."""
    layers = fp8.convert(linears(32, 32, 32, 32), recipe, backend=backend)
    x = randn(64, 32)
    for layer in layers:
        layer(x).sum().backward()
    settle(layers)

    def run(x, copied):
        y = x * 1.0
        return sum(layer(y.clone() if copied else y) for layer in layers)

    (first, size), (want, most) = (
        kept(partial(run, copied=copied), x, layers) for copied in (False, True)
    )
    assert_same(first, want)
    assert size <= most - 2 * x.numel()
    gc.collect()
    assert not operands._LAST.sources


@each_backend
@parametrize("compiled", [False, one_in(3, True)])
@parametrize("recipe", ["tensor", "static", "row"])
def test_a_weight_is_cast_again(recipe, compiled, backend, monkeypatch):
    """And its cast is not saved, nor in a graph."""
    net = fp8.convert(linears(64, 64), recipe, backend=backend)
    x = randn(16, 64)
    net(x).sum().backward()
    settle(net)
    results = []
    for least in (16, 1 << 20):
        monkeypatch.setattr(matmul, "RECAST_ROWS", least)
        torch.compiler.reset()
        run = torch.compile(net, backend="aot_eager") if compiled else net
        results.append(kept(run, x, net))
    (got, size), (want, most) = results
    assert_same(got, want)
    if recipe == "tensor" or backend == "native":
        assert size <= most - 64 * 64
    else:  # with scales along each axis it never was
        assert size <= most


def test_a_weight_that_changes_before_it_is_cast_again_is_named(monkeypatch):
    monkeypatch.setattr(matmul, "RECAST_ROWS", 16)
    net = fp8.convert(linears(16, 16), "tensor")
    y = net(randn(16, 16)).sum()
    with torch.no_grad():
        net[0].weight.add_(1.0)
    with refuses("modified by an inplace operation", RuntimeError):
        y.backward()
