"""The number of functions of this project that one product calls in eager mode."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import fp8
import unit_scaling.functional as U
from tests.shared import seeded, settle
from tests.transforms.models import GPT
from unit_scaling.transforms import unit_scale

OWN = tuple(
    str(Path(fp8.__file__).parents[1] / name) for name in ("fp8", "unit_scaling")
)


def calls(run, where=OWN):
    """The calls of functions in these files, comprehensions and items of generators included."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(where)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


LAYER = nn.Linear(16, 16)
MOST = {"tensor": (55, 25), "static": (70, 25), "delayed": (88, 30), "row": (47, 45)}
CASES = {
    "autocast": (LAYER, fp8.autocast("tensor"), 55, 25),
    "U.linear": (lambda x: U.linear(x, LAYER.weight, None), nullcontext(), 18, 5),
    "U.linear with bias": (
        lambda x: U.linear(x, LAYER.weight, LAYER.bias),
        nullcontext(),
        20,
        8,
    ),
} | {
    name: (fp8.convert(nn.Linear(16, 16), name), nullcontext(), *most)
    for name, most in MOST.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_calls_few_functions(name):
    """In the steady state, forward and backward."""
    layer, block, most, most_back = CASES[name]
    x = torch.randn(8, 16, generator=seeded(0), requires_grad=True)
    with block:
        for _ in range(5):
            y = layer(x)
            y.backward(torch.ones_like(y))
        if "fp8_watch" in getattr(layer, "__dict__", {}):
            settle(layer)
        assert 0 < calls(lambda: layer(x)) <= most
        y = layer(x)
        assert 0 < calls(lambda: y.backward(torch.ones_like(y))) <= most_back


def test_a_step_of_a_model_calls_few_functions(monkeypatch):
    """Of torch too, forward and backward: 4 blocks and 17 layers, unit-scaled and converted."""
    # Where it is loaded, each product asks whether a pipeline infers shapes.
    monkeypatch.delitem(
        sys.modules, "torch.distributed.pipelining.stage", raising=False
    )
    model, ids = GPT(layers=4), torch.randint(65, (1, 8))
    model = fp8.convert(unit_scale(model, batch=(ids, ids)))

    def step():
        _, loss = model(ids, ids)
        loss.backward()

    for _ in range(5):
        step()
    settle(model)
    assert 0 < calls(step, ("",)) <= 2600


ARITHMETIC = set("abs add amax clamp clamp_ div mul mul_ reciprocal where".split())


def test_modes_see_a_product_as_a_whole():
    """Operations inside of casts pass no torch-function mode, of ours or of a user."""

    class Seen(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    x = torch.randn(8, 16, requires_grad=True)
    for recipe in "tensor row nvfp4 static".split():
        layer = fp8.convert(nn.Linear(16, 16), recipe)
        for _ in range(3):
            layer(x)
        with Seen() as seen:
            layer(x)
        assert seen.names
        assert ARITHMETIC.isdisjoint(seen.names), recipe
