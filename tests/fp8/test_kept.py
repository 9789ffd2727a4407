"""Operands kept in bytes for the backward pass: how many, and that they come back to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fp8
from fp8 import RECIPES, Cast, Recipe, casting
from fp8.matmul import linear
from fp8.scaling import SCALINGS
from tests.fp8.test_matmul import DTYPES, randn


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
        with fp8.autocast(name, history=fp8.AmaxHistory()):
            F.linear(x, w) if function is linear else function(x, w)

    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held(run)}
    assert sum(sizes.values()) <= x.numel() + w.numel() + 8
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


@pytest.mark.parametrize("backend", ["simulate", "native"])
def test_double_backward_of_bytes_is_refused(backend):
    x, w = randn(16, 16), randn(16, 16)
    y = linear(x, w, recipe=RECIPES["unit"], backend=backend)
    with pytest.raises(RuntimeError, match=r"create_graph=True: .* torch\.func\.grad"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
