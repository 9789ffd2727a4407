"""The sums of `Recipe.accumulate` against the products of the device itself."""

import pytest
import torch
from torch.nn import functional as F

from fp8.formats.quantize import quantize
from fp8.lab.sums.dot import dot
from fp8.recipes.tensor_cores import TENSOR_CORES

CHIPS = {(8, 9): "ada", (9, 0): "hopper"}
PARTS = (0, 32, 64, 128, 256, 512)
"""After how many products a kernel may end a sum; 0: after all."""


def ending(a, b, chip, part):
    """The product, with sums that end after so many products and are added in float32."""
    part = part or a.shape[1]
    total = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], part):
        of = slice(start, start + part)
        total = total + dot(a[:, of], b[:, of], (-6, -6), TENSOR_CORES[chip])
    return total


@pytest.mark.gpu
@pytest.mark.parametrize("k", [32, 128, 1024, 4096])
def test_the_devices_product_has_these_sums(k):
    """Names the order of k that fits, in the output of ``pytest -s``; fails if none does."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    chip = CHIPS.get(torch.cuda.get_device_capability())
    if chip is None:
        pytest.skip(f"no sums are known for {torch.cuda.get_device_name()}")
    a, b = quantize(torch.randn(64, k), "e4m3"), quantize(torch.randn(64, k), "e4m3")
    one, whole = torch.ones((), device="cuda"), F.ScalingType.TensorWise
    left, right = (x.cuda().to(torch.float8_e4m3fn) for x in (a, b))
    got = {
        fast: F.scaled_mm(
            left,
            right.t(),
            one,
            whole,
            one,
            whole,
            output_dtype=torch.float32,
            use_fast_accum=fast,
        ).cpu()
        for fast in (True, False)
    }
    fits = [
        (fast, part)
        for part in PARTS
        for fast, y in got.items()
        if torch.equal(y, ending(a, b, chip, part))
    ]
    print(f"{chip}, k = {k}: (use_fast_accum, products of a sum) that fit: {fits}")
    assert fits
