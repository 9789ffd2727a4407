"""What a compiled op compares at each of its calls: little, and whatever may change."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from unit_scaling.common.watched import WATCHERS


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


X, Y, W, IMAGE = leaf(8, 8), leaf(8, 8), leaf(8), leaf(2, 8, 4)
KERNEL = leaf(8, 8, 3)
CLASSES = torch.arange(8)

#: (torch's function, its arguments) -> at most so many more nodes has ours, in torch 2.11 to 2.14.
MORE = {
    (torch, "add", X, Y): 64,
    (torch, "sin", X): 82,
    (F, "gelu", X): 62,
    (F, "layer_norm", X, (8,), W, W): 95,
    (F, "cross_entropy", X, CLASSES): 98,
    (F, "linear", X, Y): 110,
    (F, "conv1d", IMAGE, KERNEL): 200,  # sizes for each dimension, and one call without casts
}


@pytest.mark.parametrize(("given", "more"), MORE.items(), ids=[given[1] for given in MORE])
def test_few_guards(given: tuple, more: int):
    space, *rest = given
    others = 0 if torch.__version__ >= (2, 13) else 15  # those of earlier versions guard more
    assert nodes(U, *rest) - nodes(space, *rest) <= more + others


#: (Op, its tensors) -> settings that are given one after the other to one compiled function.
CHANGING = {
    ("elu", X): [{}, {"mult": 2.0}, {"mult": 1.0}, {"mult": 0.5, "alpha": 2.0}, {"alpha": 1.0}],
    ("gelu", X): [{}, {"mult": 2.0}, {"mult": 3.0}, {"constraint": None}, {"approximate": "tanh"}],
    ("softmax", X): [{"dim": 0}, {"dim": 1, "mult": 2.0}, {"dim": 1, "mult": 3.0}],
    ("add", X, Y): [{}, {"alpha": 2.0}, {"alpha": -1.0, "constraint": None}],
    ("max_pool1d", IMAGE): [{"kernel_size": 2}, {"kernel_size": (3,)}, {"kernel_size": [2]}],
    ("avg_pool1d", IMAGE): [{"kernel_size": n, "stride": m} for n in (2, 3) for m in (None, 1)],
    ("huber_loss", X, Y): [{}, {"delta": 2.0}, {"delta": 0.5}, {"reduction": "sum"}],
}


def results(fn, name: str, *args, **settings) -> list[Tensor]:
    args = [arg.detach().requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
    output = fn(U, name, *args, **settings)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return [output, *torch.autograd.grad(output, tensors, torch.ones_like(output))]


@pytest.mark.parametrize(("given", "changes"), CHANGING.items(), ids=[g[0] for g in CHANGING])
def test_changed_settings_are_seen(given: tuple, changes: list[dict]):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for settings in [*changes, *reversed(changes)]:
        got, expected = (results(fn, *given, **settings) for fn in (compiled, call))
        torch.testing.assert_close(got, expected)


#: Ops whose factors are formulas of sizes, so that one graph serves all of them.
BY_SYMBOL = [("avg_pool1d", IMAGE, 2), ("adaptive_avg_pool1d", IMAGE, 2), ("huber_loss", X, Y)]


@pytest.mark.parametrize("given", BY_SYMBOL, ids=[given[0] for given in BY_SYMBOL])
def test_one_graph_for_all_sizes(given: tuple):
    name, *args = given
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for size in (12, 20, 36):
        sized = [torch.randn(*a.shape[:-1], size) if isinstance(a, Tensor) else a for a in args]
        torch.testing.assert_close(results(compiled, name, *sized), results(call, name, *sized))
    assert len(_debug_get_cache_entry_list(call.__code__)) == 1


def test_numbers_may_be_symbols():
    """Those that change are constants of a further graph, not symbols that no rule knows."""
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for n in (2, 4):
        given = ("adaptive_avg_pool1d", X, n)
        torch.testing.assert_close(results(compiled, *given), results(call, *given))
        assert compiled(U, "dropout", X, n / 8, True).isfinite().all()


def test_changed_surroundings_are_seen():
    """The rows of a batch, the gradient mode and autocast."""
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
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
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    before = compiled(U, "sin", X)
    WATCHERS.append(lambda fn, body, args, kwargs: -body(*args, **kwargs))
    try:
        torch.testing.assert_close(compiled(U, "sin", X), -before)
    finally:
        WATCHERS.pop()
    torch.testing.assert_close(compiled(U, "sin", X), before)


def test_an_eager_product_without_a_recipe_makes_few_python_calls():
    """At most 18 calls of functions of this project, forward, for one ``addmm``."""
    ours = [str(Path(module.__file__).parent) for module in (fp8, uu)]
    called: list[str] = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(tuple(ours)):
            called.append(frame.f_code.co_name)

    U.linear(X, Y)
    sys.setprofile(note)
    try:
        U.linear(X, Y)
    finally:
        sys.setprofile(None)
    assert len(called) <= 18, called
