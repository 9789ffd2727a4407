"""Models of unit_scale in several threads: each computes what it computes in one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8.torch_internals.stance import outside_compiler
from tests.threads import TIMEOUT, Meet, meeting, switching, together
from tests.transforms.models import Net
from unit_scaling.transforms import simulate_fp8, track_scales, unit_scale

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "unit_scale": unit_scale,
    "both": lambda model: simulate_fp8(unit_scale(model)),
    "norms": lambda model: fp8.apply_low_precision_layernorm(unit_scale(model), "amp_bf16"),
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def block(seed: int = 0, layers: int = 2) -> nn.Module:
    """With products by function and by layer. A pass of unit_scale does not wait in `Meet`."""
    torch.manual_seed(seed)
    act = nn.Tanh if seed % 2 else nn.GELU
    parts = [(nn.Linear(16, 16), Meet(), act(), nn.LayerNorm(16)) for _ in range(layers)]
    body = nn.Sequential(*[part for each in parts for part in each])
    forward = lambda m, x: m.last(m.body(x) + m.body(x) @ m.body[0].weight)  # noqa: E731
    return Net(forward, body=body, last=nn.Linear(16, 4))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of all parameters and of the input."""
    x = x.clone().requires_grad_()
    y = model(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    return [y.detach(), *grads]


def assert_same(got: list, expected: list) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@each_transform
def test_two_models_and_one(transform: Any) -> None:
    """A thread changes to the other in the middle of each layer."""
    models = [transform(block(seed)) for seed in range(2)]
    for pair in (models, [models[0]] * 2):
        for _ in range(2):  # the first call, and one that measures scales
            alone = [step(model, batch(i)) for i, model in enumerate(pair)]
        with meeting(2):
            got = together(*[lambda i=i, p=pair: step(p[i], batch(i)) for i in range(2)])
        assert_same(got, alone)


@each_transform
def test_first_calls_at_once(transform: Any) -> None:
    """Of one model, and of copies of it."""
    expected = step(transform(block()), batch())
    model = transform(block())
    with switching():
        results = together(*[lambda: step(model, batch()) for _ in range(3)])
    torch.testing.assert_close(results, [expected] * 3)


def threads() -> nn.Module:
    """A model that runs its layers in threads of its own."""
    forward = lambda m, x: sum(together(*[lambda each=each: each(x) for each in m.layers]))  # noqa: E731
    return Net(forward, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(2)))


def test_parts_in_threads_of_the_forward_pass() -> None:
    """No part of it waits for the first call that waits for it. What runs there is not seen, and
    keeps its values; set by itself, each part is."""
    model = unit_scale(threads())
    assert torch.equal(model(batch()), model(batch()))
    parts = threads()
    parts.layers = nn.ModuleList(map(unit_scale, parts.layers))
    expected = sum(layer(batch()) for layer in parts.layers)
    assert_same([parts(batch())], [expected])


class Stop(nn.Module):
    """Raises what is put into `error`."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Stop.error is not None:
            raise Stop.error
        return x


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@each_transform
def test_errors_leave_nothing(transform: Any, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the thread that they are raised in, nor in those that wait for it."""
    error = KeyboardInterrupt()
    make = lambda: transform(nn.Sequential(block(), Stop(), nn.Linear(4, 4)))  # noqa: E731
    expected, model = make()(batch()), make()
    if not first:
        model(batch())
    monkeypatch.setattr(Stop, "error", error)
    with pytest.raises(type(error)):
        model(batch())
    with pytest.raises(type(error)):
        together(lambda: model(batch()))
    monkeypatch.setattr(Stop, "error", None)
    torch.testing.assert_close(model(batch()), expected)
    torch.testing.assert_close(together(lambda: model(batch())), [expected])
    assert torch.equal(torch.ones(2, 2) @ torch.full((2, 2), 1.06), torch.full((2, 2), 2.12))


def _rows(model: Any) -> list[tuple[Any, ...]]:
    """Parameters are shared: the gradient that is noted of them is that of any of the passes."""
    nodes = [n for n in model.scales_graph().nodes if "metrics" in n.meta]
    return [
        (n.name, m.fwd.rms, None if n.meta["requires_grad"] else m.bwd)
        for n, m in ((n, n.meta["metrics"]) for n in nodes)
    ]


def test_one_tracked_model() -> None:
    """Each call of each thread is measured once, with the gradients of its own tensors."""
    model, inputs = track_scales(unit_scale(block())), [batch(i) for i in range(3)]
    model(inputs[0]).sum().backward()
    alone = []
    for x in inputs:
        model(x).sum().backward()
        alone.append(_rows(model))
    with meeting(3):
        together(*[lambda x=x: model(x).sum().backward() for x in inputs])
    assert _rows(model) in alone


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def test_compiled_while_another_thread_is_eager() -> None:
    """Only the thread that runs outside of the compiler is held in eager mode."""
    model = simulate_fp8(unit_scale(small()))
    model(batch())
    expected, graphs = model(batch()), []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(1) or graph)
    inside, done = threading.Event(), threading.Event()

    def eager() -> None:
        inside.set()
        assert done.wait(TIMEOUT)

    def call() -> Tensor:
        assert inside.wait(TIMEOUT)
        try:
            return compiled(batch())
        finally:
            done.set()

    result = together(lambda: outside_compiler(eager), call)[1]
    assert graphs
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(outside_compiler(lambda: compiled(batch())), expected)


@pytest.mark.parametrize("transform", [unit_scale, TRANSFORMS["both"]])
def test_a_compiled_model_in_several_threads(transform: Any) -> None:
    torch._dynamo.reset()
    model = transform(small())
    for _ in range(2):
        step(model, batch())
    expected = [step(model, batch(i)) for i in range(3)]
    entered: list[int] = []
    compiled = torch.compile(
        model, backend=lambda graph, _: entered.append(threading.get_ident()) or graph
    )
    step(compiled, batch())
    count = len(entered)
    got = together(*[lambda i=i: step(compiled, batch(i)) for i in range(3)])
    torch.testing.assert_close(got, expected)
    assert len(entered) == count  # no guard knows the thread
