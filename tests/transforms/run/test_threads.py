"""Transformed models in several threads: each computes what it computes in one."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8.modes.autocast import outside_compiler
from tests.threads import TIMEOUT, Meet, meeting, switching, together
from unit_scaling.transforms import simulate_fp8, track_scales, unit_scale
from unit_scaling.transforms.run import transform as module

TRANSFORMS = {
    "unit_scale": unit_scale,
    "simulate_fp8": simulate_fp8,
    "both": lambda model: simulate_fp8(unit_scale(model)),
    "preserve": lambda model: unit_scale(model, init="preserve"),
    "norms": lambda model: fp8.apply_low_precision_layernorm(unit_scale(model), "amp_bf16"),
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


class Block(nn.Module):
    """With products by function and by layer, so that counts and paths matter."""

    def __init__(self, act: type[nn.Module], layers: int) -> None:
        super().__init__()
        parts = [(nn.Linear(16, 16), Meet(), act(), nn.LayerNorm(16)) for _ in range(layers)]
        self.body = nn.Sequential(*[part for each in parts for part in each])
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) + self.body(x) @ self.body[0].weight)


def block(seed: int = 0, layers: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return Block(nn.Tanh if seed % 2 else nn.GELU, layers)


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


# Calls


@each_transform
def test_two_models(transform):
    """A thread changes to the other in the middle of each layer."""
    models = [transform(block(seed)) for seed in range(2)]
    alone = [step(model, batch(i)) for i, model in enumerate(models)]
    with meeting(2):
        got = together(*[lambda i=i: step(models[i], batch(i)) for i in range(2)])
    assert_same(got, alone)


@each_transform
def test_one_model(transform):
    model = transform(block())
    alone = [step(model, batch(i)) for i in range(3)]
    with meeting(3):
        assert_same(together(*[lambda i=i: step(model, batch(i)) for i in range(3)]), alone)


@each_transform
def test_first_calls_at_once(transform):
    expected = [step(transform(block()), batch()) for _ in range(3)]
    model = transform(block())
    with switching():
        assert_same(together(*[lambda: step(model, batch()) for _ in range(3)]), expected)


def test_one_thread_records(monkeypatch):
    model, recorded = unit_scale(block()), []
    first = module.learned
    counted = lambda *args: recorded.append(1) or first(*args)  # noqa: E731
    monkeypatch.setattr(module, "learned", counted)
    with switching():
        together(*[lambda: model(batch())] * 4)
    assert len(recorded) == 1


def test_backward_in_another_thread():
    models = [simulate_fp8(unit_scale(block(seed))) for seed in range(2)]
    alone = [step(model, batch()) for model in models]
    outputs = [model(batch().requires_grad_()).square().sum() for model in models]
    calls = [lambda y=y, m=m: torch.autograd.grad(y, list(m.parameters())) for y, m in
             zip(outputs, models, strict=True)]  # fmt: skip
    for got, (_, _, *expected) in zip(together(*calls), alone, strict=True):
        assert_same(list(got), expected)


# Errors


class Stop(nn.Module):
    """Raises what is put into `error`."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Stop.error is not None:
            raise Stop.error
        return x


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@each_transform
def test_errors_leave_nothing(transform, first, monkeypatch):
    """Neither in the thread that they are raised in, nor in those that wait for it."""
    error = KeyboardInterrupt()
    model = transform(nn.Sequential(block(), Stop(), nn.Linear(4, 4)))
    expected = copy.deepcopy(model)(batch())
    if not first:
        model(batch())
    monkeypatch.setattr(Stop, "error", error)
    with pytest.raises(type(error)):
        model(batch())
    with pytest.raises(type(error)):
        together(lambda: model(batch()))
    monkeypatch.setattr(Stop, "error", None)
    assert_same([model(batch()), *together(lambda: model(batch()))], [expected, expected])
    assert torch.equal(torch.ones(2, 2) @ torch.full((2, 2), 1.06), torch.full((2, 2), 2.12))


class Threads(nn.Module):
    """Runs its layers in threads of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return sum(together(*[lambda layer=layer: layer(x) for layer in self.layers]))


def test_parts_in_threads_of_the_forward_pass():
    """No part of it waits for the recording that waits for it."""
    with pytest.raises(RuntimeError, match=r"layers\..' runs in another thread than the forward"):
        unit_scale(Threads())(batch())
    model = Threads()
    model.layers = nn.ModuleList(map(unit_scale, model.layers))  # each by itself
    expected = sum(layer(batch()) for layer in model.layers)
    assert_same([model(batch())], [expected])


def test_simulated_parts_in_threads_of_the_forward_pass():
    model = simulate_fp8(Threads())
    assert_same([model(batch())], [sum(layer(batch()) for layer in model.layers)])


class Yields(nn.Linear):
    def forward(self, x):
        yield super().forward(x)


class Awaits(nn.Linear):
    async def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("kind", [Yields, Awaits])
@pytest.mark.parametrize("transform", [unit_scale, simulate_fp8, track_scales])
def test_a_forward_that_goes_on_is_refused(transform, kind):
    with pytest.raises(TypeError, match=f"forward of {kind.__name__} goes on after its call"):
        transform(kind(4, 4))


# Measuring


def test_one_tracked_model():
    """Each call of each thread is measured once, with the gradients of its own tensors."""
    model, inputs = track_scales(unit_scale(block())), [batch(i) for i in range(3)]
    for _ in range(2):
        model(inputs[0]).sum().backward()
    alone = []
    for x in inputs:
        model(x).sum().backward()
        alone.append(_rows(model))
    with meeting(3):
        together(*[lambda x=x: model(x).sum().backward() for x in inputs])
    assert _rows(model) in alone


def _rows(model: nn.Module) -> list[tuple]:
    """Parameters are shared: the gradient that is noted of them is that of any of the passes."""
    nodes = [n for n in model.scales_graph().nodes if "metrics" in n.meta]
    return [
        (n.name, m.fwd.rms, None if n.meta["requires_grad"] else m.bwd)
        for n, m in ((n, n.meta["metrics"]) for n in nodes)
    ]


# Compiled


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def test_compiled_while_another_thread_is_eager():
    """Only the thread that runs outside of the compiler is held in eager mode."""
    model = simulate_fp8(unit_scale(small()))
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


def test_eager_while_another_thread_compiles():
    """torch.compiler.is_compiling is true in both (torch 2.13): formulas for compilers round in
    another way."""
    inside, done = threading.Event(), threading.Event()

    def backend(graph, _):
        inside.set()
        assert done.wait(TIMEOUT)
        return graph

    def first() -> list[Tensor]:
        assert inside.wait(TIMEOUT)
        try:
            return step(simulate_fp8(unit_scale(small())), batch())
        finally:
            done.set()

    expected = step(simulate_fp8(unit_scale(small())), batch())
    torch._dynamo.reset()
    fn = torch.compile(lambda x: x * 2, backend=backend)
    got = together(lambda: fn(torch.ones(3)), first)[1]
    torch.testing.assert_close(got, expected)


def test_a_compiled_model_in_several_threads():
    torch._dynamo.reset()
    model = simulate_fp8(unit_scale(small()))
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
