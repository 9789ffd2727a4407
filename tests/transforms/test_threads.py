"""Models of unit_scale in several threads: each computes what it computes in one."""

import pytest
import torch
from torch import nn

from tests.fp8.compare import outcome
from tests.shared import Net, assert_close, assert_same, parametrize, seeded
from tests.threads import Meet, switching, together
from unit_scaling.transforms import simulate_fp8, unit_scale

TRANSFORMS = {
    "unit_scale": unit_scale,
    "both": lambda model: simulate_fp8(unit_scale(model)),
}
each_transform = parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def block():
    """With products by function and by layer. A pass of unit_scale does not wait in `Meet`."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(16, 16), Meet(), nn.GELU(), nn.LayerNorm(16))
    forward = lambda m, x: m.last(m.body(x) + m.body(x) @ m.body[0].weight)  # noqa: E731
    return Net(forward, body=body, last=nn.Linear(16, 4))


def batch(seed=0):
    return torch.randn(8, 16, generator=seeded(seed))


def step(model, x):
    """The output and the gradients of all parameters and of the input."""
    x = x.clone().requires_grad_()
    return outcome(lambda: model(x), [x, *model.parameters()])


@each_transform
def test_first_calls_at_once(transform):
    """Of one model, and of copies of it."""
    expected = step(transform(block()), batch())
    model = transform(block())
    with switching():
        results = together(*[lambda: step(model, batch()) for _ in range(3)])
    assert_close(results, [expected] * 3)


def threads():
    """A model that runs its layers in threads of its own."""

    def forward(m, x):
        return sum(together(*[lambda each=each: each(x) for each in m.layers]))

    return Net(forward, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(2)))


def test_parts_in_threads_of_the_forward_pass():
    """No part of it waits for the first call that waits for it. What runs there is not seen, and
    keeps its values; set by itself, each part is."""
    model = unit_scale(threads())
    assert_same(model(batch()), model(batch()))
    parts = threads()
    parts.layers = nn.ModuleList(map(unit_scale, parts.layers))
    expected = sum(layer(batch()) for layer in parts.layers)
    assert_same([parts(batch())], [expected])


class Stop(nn.Module):
    """The identity, which a user stops."""

    stops = False

    def forward(self, x):
        if self.stops:
            raise KeyboardInterrupt
        return x


@parametrize("first", [True, False])
@each_transform
def test_errors_leave_nothing(transform, first, monkeypatch):
    """Neither in the thread that they are raised in, nor in those that wait for it."""
    make = lambda: transform(nn.Sequential(block(), Stop(), nn.Linear(4, 4)))  # noqa: E731
    expected, model = make()(batch()), make()
    if not first:
        model(batch())
    monkeypatch.setattr(Stop, "stops", True)
    with pytest.raises(KeyboardInterrupt):
        together(lambda: model(batch()))
    monkeypatch.undo()
    assert_close(model(batch()), expected)
    assert_close(together(lambda: model(batch())), [expected])
    assert_same(torch.ones(2, 2) @ torch.full((2, 2), 1.06), torch.full((2, 2), 2.12))
