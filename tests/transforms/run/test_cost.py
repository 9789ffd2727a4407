"""How many functions of Python a planned call takes, beside those of torch."""

from __future__ import annotations

import gc
import importlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.transforms.models import Net, batch, gpt, step
from unit_scaling.transforms import unit_scale


def python_calls(function: Callable[[], object]) -> Counter[str]:
    """The Python functions that ``function()`` calls, itself included: name -> calls. What the
    garbage collector calls is left out."""
    calls = Counter[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            calls[f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


CALLS = {
    "with a step": (lambda m, x: F.linear(x, m.layer.weight, m.layer.bias), 6),
    "product and residual add": (lambda m, x: x + x @ m.layer.weight, 12),
    "without a step": (lambda m, x: x.tanh(), 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_python_calls_of_a_planned_call(name: str) -> None:
    """Beside two for the module that makes it: ``forward`` and ``around`` of the mixin."""
    call, most = CALLS[name]
    torch.manual_seed(0)
    repeated = lambda m, given: [m.net(given[0]) for _ in range(given[1])]  # noqa: E731
    plain, x = Net(repeated, net=Net(call, layer=nn.Linear(8, 8))), torch.randn(4, 8)
    model = unit_scale(plain)
    model((x, 2))
    counts = []
    for each in (plain, model):
        few, many = (python_calls(lambda m=each, n=n: m((x, n))) for n in (2, 12))
        counts.append((many.total() - few.total()) / 10)
    assert counts[1] - counts[0] <= most + 2


def test_python_calls_of_a_step() -> None:
    """Of a GPT of two blocks: 9 products, 4 residual adds, 2 look-ups, 5 norms; whatever else is
    imported: pipelines make functions look at the stack."""
    importlib.import_module("torch.distributed.pipelining.stage")
    plain, model = gpt(), unit_scale(gpt())
    step(model)
    once, ours = (python_calls(lambda each=each: each(*batch())) for each in (plain, model))
    assert ours.total() - once.total() <= 270, (ours - once).most_common(20)
