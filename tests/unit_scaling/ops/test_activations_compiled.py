"""Compiled activations whose derivative is a function of their value, against float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fp8
import unit_scaling.functional as U
from unit_scaling.rules.table import OPS

NAMES = ["exp", "sigmoid", "softmax", "tanh"]
DTYPES = [torch.float32, torch.bfloat16]
SETTINGS = [("to_output_scale", 1.0), (None, 0.5)]
CASES = [(name, *case) for name in NAMES for case in zip(DTYPES, SETTINGS, strict=True)]
ARGUMENTS: dict[str, dict[str, Any]] = {"softmax": {"dim": -1}}


def torch_function(name: str) -> Any:
    return getattr(torch if hasattr(torch, name) else F, name)


def factor(name: str, x: Tensor, **settings: Any) -> float:
    """Of the gradient."""
    given = {"input": x, **settings} if name == "softmax" else settings
    return OPS[name].rule(**given)["input"]


def calls(xs: list[Tensor]) -> list[Tensor]:
    """One call for each of CASES, and two of functions where they are saturated."""
    outputs = [
        OPS[name].fn(x, constraint=constraint, mult=mult, **ARGUMENTS.get(name, {}))
        for (name, _, (constraint, mult)), x in zip(CASES, xs, strict=False)
    ]
    return outputs + [f(x) for x in xs[len(CASES) :] for f in (U.tanh, U.sigmoid)]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """The inputs, outputs and output gradients of one graph of all calls, which keeps what inductor
    chooses to keep."""
    torch.manual_seed(0)
    xs = [torch.randn(16, 32).to(dtype).requires_grad_() for _, dtype, _ in CASES]
    xs += [torch.tensor([200.0, torch.inf]).to(t).requires_grad_() for t in DTYPES]
    torch._dynamo.reset()
    ys = torch.compile(calls, fullgraph=True, backend="aot_eager_decomp_partition")(xs)
    grads = [torch.randn_like(y) for y in ys]
    torch.autograd.backward(ys, grads)
    return {"inputs": xs, "outputs": ys, "grads": grads}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(case: tuple[Any, ...], compiled: dict[str, Any]):
    """Rounding the output, by half an eps, moves tanh' = 1 - t^2 by eps, and the others by less;
    each of at most four operations, and the result, adds half an eps at most."""
    name, dtype, (constraint, mult) = case
    arguments = ARGUMENTS.get(name, {})
    settings = {"constraint": constraint, "mult": mult, **arguments}
    x, y, grad = (compiled[part][CASES.index(case)] for part in ("inputs", "outputs", "grads"))
    scale = factor(name, x, **settings)
    exact = x.detach().double().requires_grad_()
    value = torch_function(name)(exact * mult, **arguments)
    (expected,) = torch.autograd.grad(value, exact, grad.double())
    expected *= scale if name == "softmax" else scale / mult
    atol = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(x.grad.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(y, OPS[name].fn(x, **settings))


def test_a_saturated_number_has_the_gradient_zero(compiled: dict[str, Any]):
    """As in torch: the limit is a number of the dtype, and not beyond the factor as rounded."""
    saturated = compiled["inputs"][len(CASES) :]
    assert [x.grad.tolist() for x in saturated] == [[0.0, 0.0]] * 2


def test_relu_keeps_what_a_recipe_says():
    """A bit for each number."""
    recipe = dataclasses.replace(fp8.RECIPES["unit"], saved_activations=fp8.Cast(format="e4m3"))

    def call(x: Tensor) -> Tensor:
        with fp8.autocast(recipe):
            return U.relu(x)

    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.compile(call, backend="aot_eager")(torch.randn(4, 16, requires_grad=True))
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.uint8, 8)]


def test_forward_mode_in_a_graph():
    def derivatives(x: Tensor, tangent: Tensor) -> list[tuple[Tensor, Tensor]]:
        ops = [functools.partial(OPS[name].fn, **ARGUMENTS.get(name, {})) for name in NAMES]
        return [torch.func.jvp(op, (x,), (tangent,)) for op in ops]

    x, tangent = torch.randn(2, 4, 8, dtype=torch.float64).unbind()
    got = torch.compile(derivatives, backend="aot_eager", fullgraph=True)(x, tangent)
    torch.testing.assert_close(got, derivatives(x, tangent))


def test_a_cast_before_the_softmax_keeps_the_dtype_of_the_gradient():
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    graph = torch.compile(lambda x: U.softmax(x, -1, torch.float32), backend="aot_eager")
    y = graph(x)
    y.square().sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.float32, torch.bfloat16)
