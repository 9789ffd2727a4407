"""Recipe "static" under `fp8.autocast`: each product of a pass has its scales in a history."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import AmaxHistory
from tests.fp8.calls import CALLS, name_of, operands
from tests.fp8.products.test_matmul import randn
from tests.fp8.surgery.test_static import rms


@pytest.mark.parametrize("function", CALLS, ids=name_of)
def test_every_product_is_calibrated_by_call(function):
    """Its operands, and the gradient; after that the block casts under these scales."""
    row, history = CALLS[function], AmaxHistory()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tensors = nn.ParameterList(2.0**-7 * t.detach() for t in operands(row))

        def forward(self) -> Tensor:
            return function(*row.before, *[t * 1 for t in self.tensors], **row.kwargs)

    model = Model()
    with fp8.autocast("static", history=history):
        scales = fp8.calibrate(model, ())
    kinds = [kind for kind in row.kinds if kind != "none"]
    assert [name.split(".")[0] for name in scales] == ["001"] * (len(kinds) + 1)
    assert None not in scales.values()
    assert fp8.calibration(history) == scales
    assert history.known == set(scales)
    cast = [t for t, k in zip(model.tensors, row.kinds, strict=True) if k != "none"]
    for tensor, (name, e) in zip(cast, scales.items(), strict=False):
        assert abs(math.log2(rms(tensor.detach())) - e) <= 0.51, name
    with fp8.autocast("static", history=history):
        y = model()
    y.sum().backward()
    assert fp8.calibration(history) == scales
    exact = model()
    assert (y - exact).norm() <= 0.15 * exact.norm()
    other = AmaxHistory()
    assert fp8.calibrate(other, scales=scales) == scales
    other.load_state_dict(history.state_dict())
    assert other.known == history.known


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def test_attention_by_call_and_compiled():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x, history = Attention(), (1e-2 * randn(4, 8, 16)).detach(), AmaxHistory()
    with fp8.autocast("static", history=history):
        scales = fp8.calibrate(model, x)
    assert {name.split(".")[1] for name in scales} == {"linear", "attention"}
    assert sum(".attention." in name for name in scales) == 4

    def forward(x: Tensor) -> Tensor:
        with fp8.autocast("static", history=history):
            return model(x)

    expected = forward(x)
    y = torch.compile(forward, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(y, expected)
    exact = model(x)
    assert (expected - exact).norm() < 0.1 * exact.norm()
    assert fp8.calibration(history) == scales
    torch._dynamo.reset()


def test_checkpoints_by_call_find_their_own_scales():
    """What is recomputed counts its products from where the checkpoint began."""
    torch.manual_seed(0)
    first, second, third = (nn.Linear(8, 8, bias=False) for _ in range(3))
    with torch.no_grad():
        second.weight.mul_(2.0**-20)
    model, history = nn.ModuleList([first, second, third]), AmaxHistory()

    def forward(x: Tensor, again: bool) -> Tensor:
        inner = lambda x: third(2.0**20 * second(x))  # noqa: E731
        if again:
            how = {"use_reentrant": False, "context_fn": fp8.checkpoint_contexts}
            return checkpoint(inner, first(x), **how)
        return inner(first(x))

    model.forward = forward
    x = randn(16, 8).detach()
    with fp8.autocast("static", history=history):
        scales = fp8.calibrate(model, (x, False))
    assert scales["002.linear.1"] < -18
    grads = []
    for again in (False, True):
        model.zero_grad()
        with fp8.autocast("static", history=history):
            y = forward(x, again).sum()
        y.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))
    assert fp8.calibration(history) == scales
