"""NATIVE by the calls of torch's kernel: each row, forward and backward, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fp8
from fp8.native.coverage import NATIVE

pytestmark = pytest.mark.native


def randn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
    return x.requires_grad_()


ENDS = torch.tensor([16, 48], dtype=torch.int32)

CALLS: dict[str, Callable[[], Tensor]] = {
    "linear layer": lambda: F.linear(randn(2, 32, 64), randn(64, 64)),
    "product of two matrices": lambda: randn(2, 32, 64) @ randn(64, 64),
    "einsum": lambda: torch.einsum("bik,jk->bij", randn(2, 32, 64), randn(64, 64)),
    "grouped product with weights": lambda: F.grouped_mm(
        randn(48, 64), randn(2, 64, 64), offs=ENDS
    ),
    "grouped product of two activations": lambda: F.grouped_mm(
        randn(64, 48), randn(48, 64), offs=ENDS
    ),
    "batch of matrices": lambda: torch.bmm(randn(2, 64, 64), randn(2, 64, 64)),
    "attention": lambda: F.scaled_dot_product_attention(*(randn(1, 2, 64, 64) for _ in range(3))),
    "convolution": lambda: F.conv2d(randn(2, 16, 8, 8), randn(16, 16, 1, 1)),
    "bilinear form": lambda: F.bilinear(randn(32, 64), randn(32, 64), randn(64, 64, 64)),
}


@pytest.mark.parametrize("product", NATIVE)
def test_kernels_compute_what_the_table_says(product: str, monkeypatch: pytest.MonkeyPatch):
    calls, multiply = [], F.scaled_mm

    def counted(*args, **kwargs):
        calls.append(product)
        return multiply(*args, **kwargs)

    with fp8.autocast("unit", backend="native"):
        torch.ones(32, 32) @ torch.ones(32, 32)  # the self-test
        monkeypatch.setattr(F, "scaled_mm", counted)
        CALLS[product]().float().square().sum().backward()
    assert bool(calls) == NATIVE[product].is_native
    assert len(calls) % 3 == 0  # output and both gradients


@pytest.mark.parametrize("product", [n for n, row in NATIVE.items() if not row.is_native])
def test_what_kernels_do_not_compute_is_simulated(product: str):
    """So that both backends give the same bits."""
    results = []
    for backend in ("native", "simulate"):
        torch.manual_seed(0)
        with fp8.autocast("unit", backend=backend):
            results.append(CALLS[product]())
    assert torch.equal(*results)
