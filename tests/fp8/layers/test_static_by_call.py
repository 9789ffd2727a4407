"""Recipe "static" in layers of several products: each product of a call has its scales."""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8
from tests.fp8.blocks import block, keeper
from tests.fp8.calls import CALLS, operands
from tests.fp8.compare import outcome
from tests.shared import (
    Net,
    assert_same,
    normal,
    pairs,
    parametrize,
    randn,
    refuses,
    rms,
)


@parametrize("function", CALLS)
def test_every_product_is_calibrated_by_call(function):
    """Its operands, and the gradient; after that they are cast under these scales."""
    row = CALLS[function]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tensors = nn.ParameterList(2.0**-7 * t.detach() for t in operands(row))
            self.scales = keeper("static")

        def exact(self):
            return function(*row.before, *[t * 1 for t in self.tensors], **row.kwargs)

        def forward(self):
            with block("static", layer=self.scales):
                return self.exact()

    model = Model()
    scales = fp8.calibrate(model, ())
    kinds = [kind for kind in row.kinds if kind != "none"]
    assert [name.split("_")[0] for name in scales] == ["scales.001"] * (len(kinds) + 1)
    assert None not in scales.values()
    assert all(vars(model.scales.fp8_measured).values())
    cast = [t for t, k in pairs(model.tensors, row.kinds) if k != "none"]
    for tensor, (name, e) in zip(cast, scales.items(), strict=False):
        assert abs(math.log2(rms(tensor.detach())) - e) <= 0.51, name
    y, exact = model(), model.exact()
    y.sum().backward()
    assert fp8.calibration(model) == scales
    assert (y - exact).norm() <= 0.15 * exact.norm()


def test_checkpoints_of_a_layer_and_inside_of_it():
    """A part of a layer would number its products anew."""
    forward = lambda m, x: m.inner(x, x, x, need_weights=False)[0]  # noqa: E731
    model = Net(forward, inner=nn.MultiheadAttention(16, 2, batch_first=True))
    x = normal(4, 8, 16)
    fp8.calibrate(fp8.convert(model, "static"), x)
    plain, again = (
        outcome(lambda call=call: call(x), model.parameters())
        for call in (model, lambda x: checkpoint(model, x, use_reentrant=False))
    )
    assert_same(again, plain)

    def inside(x):
        with block("static", layer=keeper("static")):
            how = {"use_reentrant": False, "context_fn": fp8.checkpoint_contexts}
            return checkpoint(torch.mm, x, x, **how)

    with refuses("checkpoint the whole layer", NotImplementedError):
        inside(randn(8, 8))
