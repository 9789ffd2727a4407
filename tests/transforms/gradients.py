"""The gradients of a unit-scaled model, compared with the true ones of its own forward function."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from unit_scaling.transforms.plan.actions import Arriving, Placed, Step
from unit_scaling.transforms.run.scope import UnitScale

from unit_scaling.transforms.run.install import find_scope

Loss = Callable[[nn.Module], Tensor]
"""The loss of a model, for a batch that it holds."""


def without_gauges(model: nn.Module) -> nn.Module:
    """A copy with the same factors of values, whose gradients autograd computes unchanged."""
    twin = copy.deepcopy(model)
    scope = find_scope(twin, UnitScale)
    assert scope is not None
    assert scope.plans
    for plan in scope.plans.values():
        plan.steps = {key: step and _true(step) for key, step in plan.steps.items()}
        plan.calls = {key: _untracked(call) for key, call in plan.calls.items()}
        plan.places = {place: _untracked(call) for place, call in plan.places.items()}
        plan.parameters = dict.fromkeys(plan.parameters, 0)
        plan.outputs, plan.ends, plan.arriving = {}, {}, Arriving(0)
    scope.settled.parameters = dict.fromkeys(scope.settled.parameters, 0)
    return twin


def _untracked(call: Placed) -> Placed:
    step = call.step and _true(call.step)
    sources = tuple((slot, 0) for slot, _ in call.sources)
    gauge = call.gauge and 0
    return dataclasses.replace(call, step=step, gauge=gauge, sources=sources, kept=None)


def _true(step: Step) -> Step:
    scales = step.constraint
    if isinstance(scales, tuple):
        output = dict(scales)["output"]
        scales = tuple((name, output) for name, _ in scales)
    slots = tuple((slot, fwd, fwd) for slot, fwd, _ in step.slots)
    return dataclasses.replace(step, constraint=scales, slots=slots, end=None, starts=())


def gradients(model: nn.Module, loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of parameters; None for those without are left out."""
    model.zero_grad()
    value = loss(model)
    value.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return value.detach(), found


def exponent(ours: Tensor, true: Tensor, rtol: float = 1e-9) -> int:
    """The power of two between two gradients. Asserts that there is one."""
    ratio = ((ours * true).sum() / true.square().sum()).item()
    assert ratio > 0, ratio
    power = round(math.log2(ratio))
    error = ((ours * 2.0**-power - true).norm() / true.norm()).item()
    assert error <= rtol, f"{ratio} is no power of two: error {error}"
    return power


def check_true(model: nn.Module, loss: Loss, rtol: float = 1e-9) -> dict[str, int]:
    """Asserts that each gradient is that of the same forward function times a power of two.

    Returns the exponents.
    """
    loss(model)  # makes the plan
    value, ours = gradients(model, loss)
    expected, true = gradients(without_gauges(model), loss)
    assert torch.equal(value, expected)
    assert ours.keys() == true.keys()
    zero = [name for name, grad in true.items() if not grad.any()]
    assert not any(ours[name].any() for name in zero)
    return {n: exponent(ours[n], true[n], rtol) for n in true if n not in zero}


def check_slopes(model: nn.Module, loss: Loss, rtol: float = 1e-4) -> dict[str, int]:
    """As `check_true`, by finite differences of the loss: they know nothing of plans.

    For deterministic models in float64.
    """
    loss(model)
    _, ours = gradients(model, loss)
    generator, found = torch.Generator().manual_seed(0), {}
    for name, parameter in model.named_parameters():
        grad = ours.get(name)
        if grad is None or not grad.any():
            continue
        noise = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
        direction = grad / grad.norm() + 0.3 * noise / noise.norm()
        slope = _slope(parameter, direction, lambda: loss(model))
        exact = math.log2(((grad * direction).sum() / slope).item())
        found[name] = round(exact)
        assert abs(exact - found[name]) < rtol, f"{name}: {2.0**exact} is no power of two"
    return found


@torch.no_grad()
def _slope(parameter: Tensor, direction: Tensor, value: Callable[[], Tensor]) -> Tensor:
    """The derivative of a loss with respect to a parameter, in a direction."""
    start, step = parameter.clone(), 1e-6 * max(1.0, parameter.norm().item())
    ends = []
    for sign in (1, -1):
        parameter.copy_(start + sign * step * direction)
        ends.append(value())
    parameter.copy_(start)
    return (ends[0] - ends[1]) / (2 * step)
