"""Operands kept in bytes for the backward pass: how many, and that they come back to the bit."""

from __future__ import annotations

import dataclasses
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import RECIPES, Cast, Recipe
from fp8.casts import casting
from fp8.products.matmul import linear
from fp8.recipes.scaling import SCALINGS
from tests.fp8.blocks import block
from tests.fp8.products.test_matmul import DTYPES, randn


def held(run) -> list[Tensor]:
    """What autograd keeps of a call."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["unit", "tensor", "delayed"])
@pytest.mark.parametrize("function", [linear, F.conv1d], ids=["linear", "conv"])
def test_operands_are_kept_in_bytes(function, name, dtype):
    """A quarter of float32 and half of bfloat16, and as many bytes for the scales."""
    x, w = (
        (randn(32, 64, 8), randn(48, 64, 3))
        if function is F.conv1d
        else (randn(64, 32), randn(48, 32))
    )
    x, w = x.to(dtype), w.to(dtype)

    def run() -> None:
        with block(name):
            F.linear(x, w) if function is linear else function(x, w)

    assert bytes_of(held(run)) <= x.numel() + w.numel() + 8
    with torch.no_grad():
        assert not held(run)


@pytest.mark.parametrize("rule", SCALINGS["tensor"].rules)
@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_in_bytes_is_the_same_to_the_bit(dtype, format, rule):
    """For every number of the format under a scale, NaN and Inf among them."""
    cast = Cast(format=format, scaling="tensor", rule=rule, overflow="nonfinite")
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.FORMATS[format].dtype).double()
    x = (codes[codes.isfinite()] * 0.3).to(dtype).reshape(1, -1).requires_grad_()
    for extreme in ([], [float("nan")], [float("inf")]):
        a = torch.cat([x, torch.tensor([extreme], dtype=dtype)], dim=1)
        recipe = Recipe(name="one", input=cast)
        w = torch.ones(1, a.shape[1], dtype=dtype, requires_grad=True)
        (got,) = torch.autograd.grad(linear(a, w, recipe=recipe).sum(), w)
        torch.testing.assert_close(
            got, casting.cast_forward(a, cast), equal_nan=True, rtol=0, atol=0
        )


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["unit", "tensor", "row", "mxfp8"])
def test_a_second_derivative_reads_bytes_straight_through_their_casts(name, again):
    """torch.func keeps tensors: of products, of a convolution and of an activation."""
    recipe = dataclasses.replace(RECIPES[name], saved_activations=Cast(format="e4m3"))
    tensors = [randn(8, 4, 32).detach(), randn(8, 4, 3).detach(), randn(8, 32).detach()]

    def function(x, kernel, w):
        with fp8.autocast(recipe):
            y = F.silu(F.conv1d(x, kernel, padding=1)) @ w.mT
        return y.square().sum()

    def checkpointed(*given):
        return checkpoint(function, *given, use_reentrant=False) if again else function(*given)

    def slope(*given):
        return torch.func.grad(function)(*given).square().sum()

    want = torch.func.grad(slope, argnums=(0, 1, 2))(*tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    with torch.autograd.graph.save_on_cpu():
        (first,) = torch.autograd.grad(checkpointed(*leaves), leaves[0], create_graph=True)
    for got, expected in zip(torch.autograd.grad(first.square().sum(), leaves), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.native
def test_double_backward_of_kernels_is_refused():
    x, w = randn(16, 16), randn(16, 16)
    y = linear(x, w, recipe=RECIPES["unit"], backend="native")
    with pytest.raises(RuntimeError, match="create_graph=True: products of backend='native'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def bytes_of(tensors) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def grads(inputs, weights, function, recipe, backend) -> list[Tensor]:
    """Of each input and each weight, when all products run forward before any runs backward."""
    with block(recipe, backend):
        products = [function(x, w).square().sum() for x, w in zip(inputs, weights, strict=True)]
    return list(torch.autograd.grad(sum(products), [*inputs, *weights]))


@pytest.mark.parametrize(
    ("function", "backend", "name"),
    [
        (F.linear, "simulate", "unit"),
        (F.linear, "simulate", "tensor"),
        (F.linear, "native", "unit"),
        (F.linear, "simulate", "delayed"),
        (F.linear, "native", "row"),
        (F.linear, "native", "delayed"),
        (F.conv1d, "simulate", "unit"),
        (F.conv1d, "simulate", "tensor"),
    ],
)
def test_layers_with_one_input_keep_its_bytes_once(function, backend, name):
    """And have the gradients that they have with an input each."""
    size, shape = ((16, 4, 32), (48, 32)) if function is F.linear else ((8, 32, 8), (48, 32, 3))
    x, *weights = (randn(*dims) for dims in (size, shape, shape, shape))

    activation = x * 1.0

    def run() -> None:
        with block(name, backend):
            for w in weights:
                function(activation, w)

    assert bytes_of(held(run)) <= x.numel() + sum(w.numel() + 4 * len(w) for w in weights) + 600
    apart = grads([x.clone() for _ in weights], weights, function, name, backend)
    alike = grads([x * 1.0] * 3, weights, function, name, backend)
    torch.testing.assert_close(alike[3:], apart[3:], rtol=0, atol=0)
    torch.testing.assert_close(alike[0], sum(apart[:3]))


@pytest.mark.parametrize("backend", ["simulate", "native"])
@pytest.mark.parametrize(
    "change", ["in place", "data", "after backward", "other part", "other recipe"]
)
def test_an_input_that_is_no_longer_the_same_is_cast_again(change, backend):
    """Each gradient is that of the values which its own forward pass saw."""
    w, buffer = randn(16, 16), randn(32, 16).detach()
    x, recipe = buffer[:16], "unit"
    first = x.clone()
    with fp8.autocast("unit", backend=backend):
        y = F.linear(x, w)
    if change == "in place":
        x.mul_(2.0)
    elif change == "data":
        x.data.mul_(2.0)
    elif change == "after backward":
        torch.autograd.grad(y.sum(), w)
        x.data.mul_(2.0)  # the version of x does not tell
    elif change == "other part":
        x = buffer[16:]
    else:
        recipe = "tensor"
    with fp8.autocast(recipe, backend=backend):
        again = F.linear(x, w)
        want = F.linear(x.clone(), w)
    (got,), (expected,) = (torch.autograd.grad(out.sum(), w) for out in (again, want))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    if change != "after backward":
        with fp8.autocast("unit", backend=backend):
            (expected,) = torch.autograd.grad(F.linear(first, w).sum(), w)
        (got,) = torch.autograd.grad(y.sum(), w)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_what_products_have_shared_is_let_go_with_their_input():
    x, w = randn(16, 16) * 1.0, randn(16, 16)
    kept = held(partial(linear, x, w, recipe=RECIPES["unit"]))
    of_x = weakref.ref(next(filter(torch.Tensor.numel, kept)))
    del kept
    assert of_x() is not None
    del x
    assert of_x() is None
