"""Blocks around control flow and regions, whose functions torch runs outside of the mode."""

import pytest
import torch
from torch._higher_order_ops import map, scan, while_loop

import fp8
from tests.fp8.calls import COARSE
from tests.fp8.compare import outcome
from tests.shared import assert_close, in_one_graph, normal, parametrize, randn

WEIGHT = randn(4, 4)


def step(x):
    return torch.tanh(x @ WEIGHT)


def steps(x, n=2):
    for _ in range(n):
        x = step(x)
    return x


def scanned(x):
    carry, results = torch.zeros(2, 4), []
    for row in x:
        results.append(carry @ WEIGHT)
        carry = torch.tanh(results[-1] + row)
    return torch.stack([*results, carry])


def as_scan(x):
    def combine(carry, row):
        result = carry @ WEIGHT
        return torch.tanh(result + row), result

    carry, results = scan(combine, torch.zeros(2, 4), x)
    return torch.cat([results, carry[None]])


def one_of(x, factor=1.0):
    both = lambda x: step(x) * factor, lambda x: step(x) * -factor
    return torch.cond(x.sum() > 0, *both, (x,))


def looped(x):
    return while_loop(
        lambda i, x: i < 2, lambda i, x: (i + 1, step(x)), (torch.tensor(0), x)
    )[1]


def mapped(x):
    return map(lambda t, w: {"a": (t["x"] @ w,)}, {"x": x}, WEIGHT)["a"][0]


region = torch.compiler.nested_compile_region(step)

CALLS = {
    "cond": (one_of, lambda x: step(x) * x.sum().sign()),
    "while_loop": (looped, steps),
    "map": (mapped, lambda x: x @ WEIGHT),
    "scan": (as_scan, scanned),
    "region": (lambda x: region(region(x)), steps),
}
GRAPHS = "cond while_loop map region".split()  # torch refuses a scan by name


def under(call, recipe=COARSE):
    def block(x):
        with fp8.autocast(recipe):
            return call(x)

    return block


def gradients(call, x):
    x = x.detach().requires_grad_()
    return outcome(lambda: call(x), [x, WEIGHT])


@parametrize("name, sign", [*((name, 1) for name in CALLS), ("cond", -1)])
def test_eager_code_casts_what_the_functions_compute(name, sign):
    """With its gradients, those of while_loop too, which torch does not have."""
    call, same = CALLS[name]
    if name == "scan" and torch.__version__ < (2, 13):
        pytest.skip("the gradients of scan are wrong in torch 2.11")
    x = sign * normal(3, 2, 4).abs()
    expected = gradients(under(same), x)
    assert_close(gradients(under(call), x), expected)
    assert not torch.allclose(expected[0], same(x))


@parametrize("name", GRAPHS)
def test_a_graph_casts_what_the_functions_compute(name):
    call, same = CALLS[name]
    x = normal(3, 2, 4).abs().requires_grad_(name != "while_loop")
    compiled = in_one_graph(under(call))
    assert_close(compiled(x), under(same)(x))
