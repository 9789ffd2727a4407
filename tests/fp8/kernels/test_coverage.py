"""The table of native products by the calls of torch's kernel, forward and backward, on the CPU."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import fp8
from tests.fp8 import operands

pytestmark = pytest.mark.native


randn = partial(operands.randn, dtype=torch.bfloat16)
ENDS = torch.tensor([16, 48], dtype=torch.int32)

CALLS = {
    "linear layer": lambda: F.linear(randn(2, 32, 64), randn(64, 64)),
    "product of two matrices": lambda: randn(2, 32, 64) @ randn(64, 64),
    "einsum": lambda: torch.einsum("bik,jk->bij", randn(2, 32, 64), randn(64, 64)),
    "grouped product": lambda: F.grouped_mm(randn(48, 64), randn(2, 64, 64), offs=ENDS),
    "batch of matrices": lambda: torch.bmm(randn(2, 64, 64), randn(2, 64, 64)),
    "attention": lambda: F.scaled_dot_product_attention(
        *(randn(1, 2, 64, 64) for _ in range(3))
    ),
    "convolution": lambda: F.conv2d(randn(2, 16, 8, 8), randn(16, 16, 1, 1)),
}

NATIVE = {"linear layer", "product of two matrices", "einsum"}


def rows():
    """Product -> "yes" or "no", of docs/simulation-and-hardware.md."""
    text = Path("docs/simulation-and-hardware.md").read_text()
    table = text.partition("| --- | --- | --- |\n")[2].partition("\n\n")[0]
    cells = [row.strip("| ").split(" | ") for row in table.split("\n")]
    return {product: is_native for product, is_native, _ in cells}


def test_the_page_says_which():
    assert rows() == {name: "yes" if name in NATIVE else "no" for name in CALLS}


@pytest.mark.parametrize("product", CALLS)
def test_kernels_compute_what_the_table_says(product, monkeypatch):
    calls, multiply = [], F.scaled_mm

    def counted(*args, **kwargs):
        calls.append(product)
        return multiply(*args, **kwargs)

    with fp8.autocast("unit", backend="native"):
        torch.ones(32, 32) @ torch.ones(32, 32)  # the self-test
        monkeypatch.setattr(F, "scaled_mm", counted)
        CALLS[product]().float().square().sum().backward()
    assert bool(calls) == (product in NATIVE)
    assert len(calls) % 3 == 0  # output and both gradients
