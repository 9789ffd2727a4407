"""What a compiled op compares at each of its calls: little, and whatever may change."""

import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import unit_scaling as uu
import unit_scaling.functional as U
from tests.shared import assert_close, parametrize


def call(space, name, *args, **settings):
    return getattr(space, name)(*args, **settings)


def compiled_call(**settings):
    return torch.compile(call, backend="eager", fullgraph=True, **settings)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


X, Y, IMAGE = leaf(8, 8), leaf(8, 8), leaf(2, 8, 4)


#: (Op, its tensors) -> settings that are given one after the other to one compiled function.
CHANGING = {
    ("elu", X): [
        {},
        {"mult": 2.0},
        {"mult": 1.0},
        {"mult": 0.5, "alpha": 2.0},
        {"alpha": 1.0},
    ],
    ("gelu", X): [
        {},
        {"mult": 2.0},
        {"mult": 3.0},
        {"constraint": None},
        {"approximate": "tanh"},
    ],
    ("softmax", X): [{"dim": 0}, {"dim": 1, "mult": 2.0}, {"dim": 1, "mult": 3.0}],
    ("add", X, Y): [{}, {"alpha": 2.0}, {"alpha": -1.0, "constraint": None}],
    ("max_pool1d", IMAGE): [
        {"kernel_size": 2},
        {"kernel_size": (3,)},
        {"kernel_size": [2]},
    ],
    ("avg_pool1d", IMAGE): [
        {"kernel_size": n, "stride": m} for n in (2, 3) for m in (None, 1)
    ],
    ("huber_loss", X, Y): [{}, {"delta": 2.0}, {"delta": 0.5}, {"reduction": "sum"}],
}


def results(fn, name, *args, **settings):
    args = [
        arg.detach().requires_grad_() if isinstance(arg, Tensor) else arg
        for arg in args
    ]
    output = fn(U, name, *args, **settings)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return [output, *torch.autograd.grad(output, tensors, torch.ones_like(output))]


def check_same(compiled, *given, **settings):
    assert_close(
        results(compiled, *given, **settings), results(call, *given, **settings)
    )


@parametrize("given, changes", CHANGING.items(), ids=[g[0] for g in CHANGING])
def test_changed_settings_are_seen(given, changes):
    compiled = compiled_call()
    for settings in [*changes, *reversed(changes)]:
        check_same(compiled, *given, **settings)


#: Ops whose factors are formulas of sizes, so that one graph serves all of them.
BY_SYMBOL = [
    ("avg_pool1d", IMAGE, 2),
    ("adaptive_avg_pool1d", IMAGE, 2),
    ("huber_loss", X, Y),
]


@parametrize("given", BY_SYMBOL, ids=[given[0] for given in BY_SYMBOL])
def test_one_graph_for_all_sizes(given):
    name, *args = given
    compiled = compiled_call(dynamic=True)
    for size in (12, 20, 36):
        sized = [
            torch.randn(*a.shape[:-1], size) if isinstance(a, Tensor) else a
            for a in args
        ]
        check_same(compiled, name, *sized)
    assert len(_debug_get_cache_entry_list(call.__code__)) == 1


def test_numbers_may_be_symbols():
    """Those that change are constants of a further graph, not symbols that no rule knows."""
    compiled = compiled_call(dynamic=True)
    for n in (2, 4):
        check_same(compiled, "adaptive_avg_pool1d", X, n)
        assert compiled(U, "dropout", X, n / 8, True).isfinite().all()


def test_changed_surroundings_are_seen():
    """The rows of a batch, the gradient mode and autocast."""
    compiled = compiled_call()
    given = ("linear", X, Y)
    for _ in range(2):
        check_same(compiled, *given)
        with uu.batch_multiplier(16):
            check_same(compiled, *given)
        with torch.no_grad():
            assert_close(compiled(U, *given), call(U, *given))
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(U, *given).dtype == torch.bfloat16
