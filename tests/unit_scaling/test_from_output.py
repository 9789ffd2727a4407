"""Compiled activations whose gradient is computed from their scaled output, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import unit_scaling.functional as U
from unit_scaling._functional.from_output import KERNELS
from unit_scaling.ops import OPS

# torch's compiler makes an instance of every autograd.Function it meets, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

DTYPES = [torch.float32, torch.bfloat16]
SETTINGS = [("to_output_scale", 1.0), (None, 0.5)]
CASES = list(itertools.product(sorted(KERNELS), DTYPES, SETTINGS))
SOFTMAX = {"softmax": {"dim": -1}}


def calls(xs: list[Tensor]) -> list[Tensor]:
    """One call for each of CASES, and two of functions where they are saturated."""
    outputs = [
        OPS[name].fn(x, constraint=constraint, mult=mult, **SOFTMAX.get(name, {}))
        for (name, _, (constraint, mult)), x in zip(CASES, xs, strict=False)
    ]
    return [*outputs, *[f(x) for x in xs[len(CASES) :] for f in (U.tanh, U.sigmoid)]]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """The inputs, outputs, output gradients and what was saved of one graph of all calls."""
    torch.manual_seed(0)
    xs = [torch.randn(16, 32).to(dtype).requires_grad_() for _, dtype, _ in CASES]
    xs += [torch.tensor([200.0, torch.inf]).to(t).requires_grad_() for t in DTYPES]
    saved: list[Tensor] = []
    torch._dynamo.reset()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ys = torch.compile(calls, fullgraph=True)(xs)
    grads = [torch.randn_like(y) for y in ys]
    torch.autograd.backward(ys, grads)
    return {"inputs": xs, "outputs": ys, "grads": grads, "saved": saved}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(case: tuple[Any, ...], compiled: dict[str, Any]):
    """Rounding the output, by half an eps, moves tanh' = 1 - t^2 by eps, and the others by less;
    each of at most four operations, and the result, adds half an eps at most."""
    name, dtype, (constraint, mult) = case
    settings = {"constraint": constraint, "mult": mult, **SOFTMAX.get(name, {})}
    x, y, grad = (compiled[part][CASES.index(case)] for part in ("inputs", "outputs", "grads"))
    scale = OPS[name].scales((x,), {}, **settings)["input"]
    exact = x.detach().double().requires_grad_()
    value = getattr(torch, name)(exact * mult, **SOFTMAX.get(name, {}))
    (expected,) = torch.autograd.grad(value, exact, grad.double())
    expected *= scale if name == "softmax" else scale / mult
    atol = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(x.grad.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(y, OPS[name].fn(x, **settings))


def test_a_saturated_number_has_the_gradient_zero(compiled: dict[str, Any]):
    """As in torch: the limit is a number of the dtype, and not beyond the factor as rounded."""
    assert [x.grad.tolist() for x in compiled["inputs"][len(CASES) :]] == [[0.0, 0.0]] * 2


def test_outputs_are_all_that_is_saved(compiled: dict[str, Any]):
    outputs = {y.data_ptr() for y in compiled["outputs"]}
    assert {t.data_ptr() for t in compiled["saved"]} == outputs


def test_a_cast_before_the_softmax_keeps_the_dtype_of_the_gradient():
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    graph = torch.compile(lambda x: U.softmax(x, -1, torch.float32), backend="aot_eager")
    y = graph(x)
    y.square().sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.float32, torch.bfloat16)
