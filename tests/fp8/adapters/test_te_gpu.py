"""TransformerEngine on a GPU, which nothing of this project has seen yet.

On a machine with both: ``python -m pytest -m gpu tests/fp8/adapters/test_te_gpu.py``.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8.adapters import transformer_engine
from fp8.common.libraries import probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _library() -> None:
    found = probe("transformer_engine")
    if found.status != "found":
        pytest.skip(f"TransformerEngine: {found.why}")


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def sqnr(got: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return 20 * math.log10(float(exact.norm() / (got.double() - exact).norm()))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("tokens", [256, 37])
@pytest.mark.parametrize("recipe", ["tensor", "unit"])
def test_as_accurate_as_our_own_products(recipe: str, tokens: int, fuse: bool):
    """Within half a decibel of simulation, outputs and gradients: the same casts, other sums."""
    torch.manual_seed(0)
    layers = (nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 256, bias=False))
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(tokens, 256, device="cuda")
    exact = results(copy.deepcopy(model).double(), x.double())
    ours = results(fp8.convert(copy.deepcopy(model), recipe, backend="simulate"), x)
    converted = transformer_engine.convert(model, recipe, fuse=fuse)
    theirs = results(converted, x)
    for one, other, value in zip(ours, theirs, exact, strict=True):
        assert sqnr(other, value) > sqnr(one, value) - 0.5
    converted.load_state_dict(converted.state_dict())
    plain = fp8.revert(converted)
    assert torch.allclose(plain(x).double(), exact[0], rtol=1e-3, atol=1e-3)
