"""The number of functions of this project that one product calls in eager mode."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8
import unit_scaling.functional as U

OWN = tuple(str(Path(fp8.__file__).parents[1] / name) for name in ("fp8", "unit_scaling"))


def calls(run: Callable[[], object]) -> int:
    """The calls of functions in OWN, comprehensions and items of generators included."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OWN)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


LAYER = nn.Linear(16, 16)
CASES = {
    "converted": (fp8.convert(nn.Linear(16, 16), "tensor"), nullcontext(), 88, 48),
    "autocast": (LAYER, fp8.autocast("tensor"), 88, 48),
    "U.linear": (lambda x: U.linear(x, LAYER.weight, None), nullcontext(), 18, 5),
    "U.linear with bias": (lambda x: U.linear(x, LAYER.weight, LAYER.bias), nullcontext(), 20, 8),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_calls_few_functions(name):
    """In the steady state, forward and backward."""
    layer, block, most, most_back = CASES[name]
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with block:
        for _ in range(2):
            y = layer(x)
            y.backward(torch.ones_like(y))
        assert 0 < calls(lambda: layer(x)) <= most
        y = layer(x)
        assert 0 < calls(lambda: y.backward(torch.ones_like(y))) <= most_back
