"""Every row of OPS compiled: several rows in one graph, with the results of eager mode."""

import functools
import inspect

import pytest
import torch
from torch import Tensor

import unit_scaling.functional as U
from tests.unit_scaling.ops.calls import RANDOM, TUPLES, op_kwargs, results, with_gradients
from unit_scaling.rules.table import OPS, Op

# torch's compiler makes an instance of every autograd.Function it meets, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

#: Ops that compile as another does, line for line.
COMPILE_ALIKE = {"conv3d", "conv_transpose2d", "conv_transpose3d"}


def run_all(settings: dict, **calls: dict) -> dict[str, Tensor]:
    return {name: OPS[name].fn(**kwargs, **settings) for name, kwargs in calls.items()}


def all_results(fn, settings: dict, calls: dict) -> dict:
    """As `results`, by op, of one call for several of them."""
    calls = {name: with_gradients(kwargs) for name, kwargs in calls.items()}
    outputs = fn(settings, **calls)
    torch.manual_seed(2)
    torch.autograd.backward(
        list(outputs.values()), [torch.randn(y.shape) for y in outputs.values()]
    )
    grads = {
        name: {k: v.grad for k, v in kwargs.items() if isinstance(v, Tensor)}
        for name, kwargs in calls.items()
    }
    return {"output": {k: v.detach() for k, v in outputs.items()}, **grads}


def has_dynamic_rule(op: Op) -> bool:
    return not {"input", "left", "query"}.isdisjoint(inspect.signature(op.rule).parameters)


def groups() -> list:
    """(operations that are compiled as one graph, their constraint, whether sizes are symbols).

    Symbolic sizes are for rules that read sizes, without constraint where there is a choice. What
    the compiler makes of those is not in the rules: its backend comes with sizes that are known.
    """
    ops = [op for op in OPS.values() if op.name not in RANDOM | COMPILE_ALIKE | TUPLES]
    free, tied = ([op for op in ops if op.constrainable is can] for can in (True, False))
    found = [(tied, {}, False), (tied, {}, True), (free, {"constraint": "to_output_scale"}, False)]
    found += [(free, {"constraint": None}, False), (free, {"constraint": None}, True)]
    return [
        pytest.param(part, settings, dynamic, id=f"{part[0].name} to {part[-1].name}, {dynamic}")
        for group, settings, dynamic in found
        for rows in [[op for op in group if has_dynamic_rule(op) or not dynamic]]
        for part in (rows[i : i + 8] for i in range(0, len(rows), 8))
    ]


def check(ops: list[Op], settings: dict, dynamic: bool, backend: str) -> None:
    torch._dynamo.reset()
    calls = {op.name: op_kwargs(op, torch.float32) for op in ops}
    compiled = torch.compile(run_all, backend=backend, fullgraph=True, dynamic=dynamic)
    expected, got = (all_results(fn, settings, calls) for fn in (run_all, compiled))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("ops", "settings", "dynamic"), groups())
def test_compiles_whole(ops: list[Op], settings: dict, dynamic: bool):
    check(ops, settings, dynamic, "eager")


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("ops", "settings", "dynamic"), groups())
def test_compiles_whole_with_autograd(ops: list[Op], settings: dict, dynamic: bool):
    check(ops, settings, dynamic, "aot_eager")


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_random_op_compiles_whole(name: str):
    torch._dynamo.reset()
    compiled = torch.compile(OPS[name].fn, backend="aot_eager", fullgraph=True)
    kwargs = op_kwargs(OPS[name], torch.float32)
    expected, got = results(OPS[name].fn, kwargs), results(compiled, kwargs)
    assert all(got[k].isfinite().all() and got[k].shape == x.shape for k, x in expected.items())


def test_forward_mode_in_a_graph():
    def derivatives(x: Tensor, tangent: Tensor) -> list[tuple[Tensor, Tensor]]:
        ops = [U.exp, U.sigmoid, U.tanh, functools.partial(U.softmax, dim=-1)]
        return [torch.func.jvp(op, (x,), (tangent,)) for op in ops]

    x, tangent = torch.randn(2, 4, 8, dtype=torch.float64).unbind()
    got = torch.compile(derivatives, backend="aot_eager", fullgraph=True)(x, tangent)
    torch.testing.assert_close(got, derivatives(x, tangent))
