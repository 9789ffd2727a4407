"""The memory of a step, counted without memory: against torch's own tensors and allocations."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import fp8
from benchmarks.forecast import Block
from fp8.casts.watch import watches_of
from fp8.lab.forecast.card import CARDS, compiling_for, why_not
from fp8.lab.forecast.forecast import _Converter, _empty, _Step
from fp8.lab.forecast.hollow import Allocations
from fp8.lab.forecast.memory import OPTIMIZERS, of_optimizer, of_passes, on_gpu
from fp8.recipes.history import Schedule
from tests.fp8.blocks import bytes_of, saved_by
from tests.shared import Net, filterwarnings, parametrize, refuses

near = partial(pytest.approx, rel=0.02)
compiles = pytest.mark.skipif(bool(why_not()), reason=why_not())


def mlp():
    up, down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
    return nn.Sequential(up, nn.GELU(), down), torch.randn(128, 64)


def block():
    """A Llama block: inputs that several products read."""
    return Block(64, 176, 2).bfloat16(), batch(1, 512, 64)


def convolutions():
    layers = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 16)]
    return nn.Sequential(*layers, *head), torch.randn(16, 8, 8, 8)


def batch(*shape):
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def peak_of(step):
    """The most bytes that torch's allocator gave in a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()
    memory = [e for e in events if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(memory, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def converted(make, recipe, backend):
    """A model and its batch, made without arithmetic."""
    step = _Step(*_empty(*make(), "cpu"), None, None)
    converter = _Converter("bf16") if recipe is None else _Converter.of(recipe)
    return step.converted(converter, backend), step.batch


@filterwarnings("ignore")
@parametrize("make", [mlp, block, convolutions])
@parametrize(
    "recipe, backend",
    [
        (None, "simulate"),
        ("unit", "simulate"),
        ("tensor", "native"),
        ("static", "native"),
        ("row", "native"),
    ],
)
def test_bytes_are_those_of_a_real_step(make, recipe, backend):
    counted = of_passes(partial(converted, make, recipe, backend))
    model, x = make()
    if recipe is not None:
        model = fp8.convert(model, recipe, backend=backend)
    if recipe == "static":
        fp8.calibrate(model, x)
    leaves = [*model.parameters(), *model.buffers(), x]

    def forward():
        for watch in watches_of(model) if recipe else ():
            watch.resume(Schedule())
            watch.looks = False  # as in nearly all passes
        return model(x)

    def step():
        y = forward()
        y.backward(torch.ones_like(y))

    if make is not block:  # kernels of convolutions on a CPU allocate copies of maps
        with Allocations() as allocations:
            allocations.add(leaves)
            before = allocations.now
            step()
        peak = allocations.peak - before
    else:
        peak = peak_of(step)
    saved = bytes_of([*saved_by(forward), *leaves]) - bytes_of(leaves)
    assert counted.kept == near(saved)
    assert counted.peak - counted.weights - counted.batch == near(peak)
    assert counted.weights == near(bytes_of(leaves[:-1]))
    assert counted.gradients == sum(p.nbytes for p in leaves if p.requires_grad)
    assert (counted.casts > 0) == (recipe is not None)


@parametrize("name", OPTIMIZERS)
def test_bytes_are_those_of_a_real_optimizer(name):
    def make():
        return nn.Sequential(nn.Linear(128, 256), nn.LayerNorm(256)).bfloat16()

    counted = of_optimizer(make, OPTIMIZERS[name])
    model, optimizer = OPTIMIZERS[name](make())
    for _ in range(3):
        model(torch.randn(4, 128, dtype=torch.bfloat16)).sum().backward()
        peak = peak_of(optimizer.step)
        held = counted.weights + counted.gradients + counted.total_state
        stored = fp8.optim.state_bytes(optimizer)
        optimizer.zero_grad()
    weights, gradients = stored.pop("weight"), stored.pop("gradient")
    assert counted.weights == near(weights)
    assert counted.gradients == near(gradients)
    assert counted.total_state == sum(stored.values())
    assert counted.step - held == near(peak)


def test_what_a_gpu_keeps_of_a_block():
    """By hand, for each token: norms keep their input and a number, attention its operands and a
    number for each head, the others what they multiply."""
    width, inner, heads, tokens = 64, 176, 2, 512
    with on_gpu((9, 0)):
        counted = of_passes(block)
        low = of_passes(partial(converted, block, "tensor", "native"))
    high = 2 * (7 * width + 4 * inner) + 4 * (2 + heads)
    assert counted.activations == tokens * high
    assert low.casts < counted.activations - low.activations
    assert low.copies == pytest.approx(4 * width**2 + 3 * width * inner, rel=0.01)


@compiles
def test_a_gpu_keeps_what_is_forecast():
    """Of the operations that a CPU composes otherwise, by the choice of a CUDA build."""

    def run(x, w):
        y = F.dropout(F.rms_norm(x, (64,), w), 0.1).unflatten(1, (2, 64))
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)
        return y.float().square().mean()

    with compiling_for(CARDS["h100"]), torch.device("cuda"):
        x, w = batch(4, 128, 64), batch(64)
        saved = saved_by(lambda: run(x, w))
        sizes = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in saved}
    module = Net(lambda self, x: run(x, self.w), w=nn.Parameter(batch(64)))
    with on_gpu((9, 0)):
        counted = of_passes(lambda: (deepcopy(module), batch(4, 128, 64)))
    assert counted.kept == pytest.approx(
        sum(sizes.values()) - x.nbytes - w.nbytes, rel=0.001
    )


@compiles
def test_the_peak_of_compiled_code_is_that_of_a_gpu():
    """By `benchmarks.gpu` on an H200, to the digits that it records: a layer of 65536 x 1664 x 6656
    whose input needs no gradient, in which the user holds the output and its gradient."""
    with torch.device("meta"):
        layer = nn.Linear(1664, 6656, bias=False).bfloat16()
        x = torch.empty(65536, 1664, dtype=torch.bfloat16)
    result = fp8.forecast(layer, x, recipes=("tensor",), hardware="h200")
    assert [variant.compiled / 1e9 for variant in result.variants] == [
        pytest.approx(measured, abs=0.01) for measured in (2.08, 2.66)
    ]
    assert "compiled: kept" in result.memory()


def test_what_cannot_be_counted_is_a_note(monkeypatch):
    """A shape that depends on values; a model without parameters."""
    monkeypatch.setattr("fp8.lab.forecast.forecast.why_not", lambda: "no")
    model = Net(lambda self, x: x[x.sum(1) > 0] * 2)
    result = fp8.forecast(model, batch(8, 16), recipes=())
    assert result["bf16"].memory is None
    assert "bf16: memory was not counted: Dynamic" in "\n".join(result.notes)
    with refuses("was not counted"):
        result.peak("bf16")
