"""bitsandbytes, run for real on the CPU: its optimizers on our weights, its layers beside ours."""

import pytest
import torch
from torch import nn

import fp8
from tests.shared import (
    Net,
    assert_same,
    by_path,
    descend,
    parametrize,
    quietly,
    refuses,
    theirs,
)
from unit_scaling.transforms import unit_scale

with quietly():
    library = pytest.importorskip("bitsandbytes", reason="the library that is adapted")

pytestmark = theirs


def train(model, optimizer, steps):
    x, target = torch.randn(256, 64), torch.randn(256, 32)
    losses = (nn.functional.mse_loss(model(x), target) for _ in range(steps))
    return descend(optimizer, losses)


@parametrize("kind", ["Linear8bitLt", "Linear4bit"])
def test_quantized_weights_stay_and_what_is_beside_them_is_converted(kind):
    """Their products are in functions of their own, which no mode sees; the weights are codes."""
    base = getattr(library.nn, kind)(64, 32).to("cpu").requires_grad_(False)
    beside, x = nn.Linear(64, 32, bias=False), torch.randn(16, 64)
    model = Net(lambda m, x: m.base(x) + m.beside(x), base=base, beside=beside)
    plain = base(x)
    fp8.convert(model)
    done = by_path(fp8.report(model), "done")
    assert done == {"base": "left alone", "beside": "converted"}
    assert "of bitsandbytes" in fp8.report(model)[0].why
    assert_same(base(x), plain)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = train(model, torch.optim.AdamW(trained, lr=1e-2), 20)
    assert losses[-1] < losses[0]
    with refuses(r"base is quantized: its weight is a .* of bitsandbytes"):
        unit_scale(model)
    model, optimizer = fp8.initialize(model, torch.optim.AdamW(trained, lr=1e-2))
    assert isinstance(model.beside.weight, fp8.ScaledTensor)
    assert not isinstance(base.weight, fp8.ScaledTensor)
    train(model, optimizer, 1)


@parametrize("size, level", [(16, "O3"), (128, "O1")])  # small: states of 32 bits
def test_at_a_level_small_steps_count(level, size):
    """It writes to the weights by an operation of its own, which no table of torch's has."""
    model, _ = fp8.initialize(nn.Linear(size, size), opt_level=level, recipe=None)
    plain = nn.Linear(size, size)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        theirs = library.optim.AdamW8bit(each.parameters(), lr=1e-6)
        for p in each.parameters():
            p.grad = torch.ones(p.shape)
        for _ in range(5):
            theirs.step()
    assert_same(model.weight.dequantize(), plain.weight)
