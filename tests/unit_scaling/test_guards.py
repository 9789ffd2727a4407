"""What a compiled op compares at each of its calls: little, and whatever may change."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.nn import functional as F

import unit_scaling as uu
import unit_scaling.functional as U
from fp8.function import taken_as_constant
from unit_scaling.watched import WATCHERS


def call(space, name: str, *args, **settings):
    return getattr(space, name)(*args, **settings)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def nodes(space, name: str, *args) -> int:
    """The size of the tree of guards of a compiled call."""
    torch._dynamo.reset()
    torch.compile(call, backend="eager", fullgraph=True)(space, name, *args)
    (entry,) = _debug_get_cache_entry_list(call.__code__)
    return sum("+- " in line for line in str(entry.guard_manager).splitlines())


X, Y, W, SLOPE, IMAGE = leaf(8, 8), leaf(8, 8), leaf(8), leaf(1), leaf(2, 8, 4)
BATCH, KERNEL = leaf(2, 8, 8), leaf(8, 8, 3)
CLASSES = torch.arange(8)

#: (torch's function, its arguments) -> at most so many more nodes has ours, in torch 2.11 to 2.13.
MORE = {
    (torch, "add", X, Y): 61,
    (torch, "mul", X, Y): 54,
    (torch, "sin", X): 28,
    (torch, "exp", X): 42,
    (torch, "sum", X, -1): 49,
    (torch, "mean", X, -1): 51,
    (F, "celu", X): 48,
    (F, "elu", X): 48,
    (F, "hardtanh", X): 60,
    (F, "gelu", X): 46,
    (F, "silu", X): 51,
    (F, "glu", X): 36,
    (F, "softmax", X, -1): 48,
    (F, "prelu", X, SLOPE): 58,
    (F, "layer_norm", X, (8,), W, W): 55,
    (F, "group_norm", IMAGE, 2, W, W): 54,
    (F, "mse_loss", X, Y): 76,
    (F, "huber_loss", X, Y): 91,
    (F, "cross_entropy", X, CLASSES): 77,
    (torch, "matmul", BATCH, BATCH): 86,
    (torch, "einsum", "bij,bjk->bik", BATCH, BATCH): 155,
    (F, "linear", X, Y): 98,
    (F, "conv1d", IMAGE, KERNEL): 135,
}


@pytest.mark.parametrize(("given", "more"), MORE.items(), ids=[given[1] for given in MORE])
def test_few_guards(given: tuple, more: int):
    space, *rest = given
    assert nodes(U, *rest) - nodes(space, *rest) <= more


#: (Op, its tensors) -> settings that are given one after the other to one compiled function.
CHANGING = {
    ("elu", X): [{}, {"mult": 2.0}, {"mult": 1.0}, {"mult": 0.5, "alpha": 2.0}, {"alpha": 1.0}],
    ("tanh", X): [{}, {"constraint": None}, {"mult": 2.0}, {"inplace": False}],
    ("gelu", X): [{}, {"mult": 2.0}, {"mult": 3.0}, {"constraint": None}, {"approximate": "tanh"}],
    ("silu", X): [{}, {"mult": 2.0, "constraint": "gmean"}, {"constraint": "hmean"}],
    ("softmax", X): [{"dim": 0}, {"dim": 1, "mult": 2.0}, {"dim": 1, "mult": 3.0}],
    ("glu", X): [{}, {"constraint": None}, {"dim": 0}],
    ("prelu", X, SLOPE): [{}, {"constraint": None}, {"constraint": "gmean"}],
    ("add", X, Y): [{}, {"alpha": 2.0}, {"alpha": -1.0, "constraint": None}],
    ("mean", X): [{"dim": 0}, {"dim": (0, 1)}, {"dim": None}, {"dim": 1, "keepdim": True}],
    ("huber_loss", X, Y): [{}, {"delta": 2.0}, {"delta": 0.5}, {"reduction": "sum"}],
    ("mse_loss", X, Y): [{}, {"reduction": "none"}, {"weight": Y.detach().abs()}],
    ("layer_norm", X, (8,), W, W): [{}, {"eps": 1.0}],
}


def results(fn, name: str, *args, **settings) -> list[Tensor]:
    args = [arg.detach().requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
    output = fn(U, name, *args, **settings)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return [output, *torch.autograd.grad(output, tensors, torch.ones_like(output))]


@pytest.mark.parametrize(("given", "changes"), CHANGING.items(), ids=[g[0] for g in CHANGING])
def test_changed_settings_are_seen(given: tuple, changes: list[dict]):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for settings in [*changes, *reversed(changes)]:
        got, expected = (results(fn, *given, **settings) for fn in (compiled, call))
        torch.testing.assert_close(got, expected)


def test_changed_settings_of_an_own_function_are_seen():
    snake = uu.unit_scaled(lambda x, a=1.0, b=1.0: x + (a * x).sin().square() / b)
    torch._dynamo.reset()
    compiled = torch.compile(snake, backend="aot_eager", fullgraph=True)
    for a, b, mult in [(1.0, 1.0, 1.0), (2.0, 1.5, 1.0), (0.5, 2.0, 3.0), (1.0, 1.0, 1.0)]:
        torch.testing.assert_close(compiled(X, a, b=b, mult=mult), snake(X, a, b=b, mult=mult))


def test_changed_surroundings_are_seen():
    """The rows of a batch, the gradient mode and autocast."""
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    given = ("linear", X, Y)
    for _ in range(2):
        torch.testing.assert_close(results(compiled, *given), results(call, *given))
        with uu.batch_multiplier(16):
            torch.testing.assert_close(results(compiled, *given), results(call, *given))
        with torch.no_grad():
            torch.testing.assert_close(compiled(U, *given), call(U, *given))
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(U, *given).dtype == torch.bfloat16


def test_a_watcher_is_seen():
    def watcher(fn, body, args, kwargs):
        return -body(*args, **kwargs)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    before = compiled(U, "sin", X)
    WATCHERS.append(watcher)
    try:
        torch.testing.assert_close(compiled(U, "sin", X), -before)
    finally:
        WATCHERS.pop()
    torch.testing.assert_close(compiled(U, "sin", X), before)


def test_mark_is_that_of_torch():
    ours = taken_as_constant(lambda: 1.0)
    assert vars(ours) == vars(torch.compiler.assume_constant_result(lambda: 1.0))
