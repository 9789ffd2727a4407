"""Executes a plan: a torch-function mode that takes the step of each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8.casts.measuring import MEASURING
from fp8.common.compiler import called
from fp8.common.threads import Stack
from fp8.context.active import ACTIVE, with_static

from ...rules.table import OPS
from ...scale import scale_each
from ..plan.plan import Step, Steps
from ..record.calls import Calls, Slot, replaced, tensors_in
from ..record.kinds import METHODS, PRODUCTS, RECURRENT, canonical
from ..record.place import Place, lines_here
from .gradients import GradientScales
from .install import Args, Kwargs


class Planned(Protocol):
    """The part of `run.transform.UnitScale` that a run uses."""

    kinds: Mapping[Callable[..., Any], str]
    stepped: Mapping[str, Any]
    replacements: Mapping[Callable[..., Any], Callable[..., Any]]
    gradients: GradientScales

    def steps_at(self, place: Place) -> Steps | None: ...
    def learn(self, place: Place, function: Any, args: Args, kwargs: Kwargs) -> Steps: ...


RUNNING = Stack()
"""The transforms that are running in this thread, innermost last: the innermost one acts."""


class Replay(Calls):
    """Executes the plan of a transform. owner: the transform. path: the stack of running
    modules."""

    def __init__(self, planned: Planned, owner: object, path: list[str], in_pairs: bool) -> None:
        super().__init__(in_pairs)
        self._planned, self._owner = planned, owner
        self._path = path
        self._counts: dict[Place, int] = {}
        self.latest: Step | None = None  # the step of the previous call, for measuring

    def sees(self) -> bool:
        return not self._busy and RUNNING.items[-1] is self._owner

    def observe(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        kind = self._kind(function)
        if kind not in self._planned.stepped:
            return called(function, args, kwargs)
        place = self._path[-1], kind, lines_here()
        steps = self._planned.steps_at(place)
        if steps is None and not any(t.is_floating_point() for _, t in tensors_in((args, kwargs))):
            return called(function, args, kwargs)
        if steps is None:
            steps = self._planned.learn(place, function, args, kwargs)
        step = steps[0]
        if len(steps) > 1:
            number = self._counts.get(place, 0)
            self._counts[place] = number + 1
            step = steps[min(number, len(steps) - 1)]
        return self._taken(place, step, function, args, kwargs)

    def _kind(self, function: Callable[..., Any]) -> str | None:
        if torch.compiler.is_compiling():
            for method, kind, _ in METHODS:
                if function is method:
                    return kind
        return self._planned.kinds.get(function)

    def _taken(
        self,
        place: Place,
        step: Step | None,
        function: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """The result of a call with its step."""
        self.latest = step
        casts = place[1] in CAST and (bool(ACTIVE.blocks) or bool(MEASURING.items))
        gradient = self._planned.gradients.of(place) if casts else None
        if step is None and gradient is None:
            return called(function, args, kwargs)
        if step is not None and step.op == "replace":
            return _replaced(self._planned.replacements[function], step, args, kwargs)
        return take(step or Step(), function, args, kwargs, gradient)


CAST = PRODUCTS | RECURRENT
"""The kinds whose operands and gradients are cast."""


def _replaced(other: Callable[..., Any], step: Step, args: Args, kwargs: Kwargs) -> Any:
    output = other(*args, **kwargs)
    return args[0].copy_(output) if step.writes else output


def take(
    step: Step, function: Callable[..., Any], args: Args, kwargs: Kwargs, gradient: Any = None
) -> Any:
    """The result of a call of torch under its step. gradient: the static scale of its gradient."""
    if step.slots:
        args, kwargs = _with_slots(step, *canonical(function, args, kwargs))
    if not (step.static or gradient):
        return _computed(step, function, args, kwargs)
    if step.static:
        args, kwargs = canonical(function, args, kwargs)
    given = dict((*tensors_in(args), *tensors_in(kwargs)))
    operands = [(given[slot], exponent) for slot, exponent in step.static if slot in given]
    compute = partial(_computed, step, function)
    return with_static(operands, gradient, lambda *a, **k: compute(a, k), args, kwargs)


def _with_slots(step: Step, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    given = dict((*tensors_in(args), *tensors_in(kwargs)))
    changed: dict[Slot, Tensor] = {}
    for slot, factor in step.slots:
        if slot == (0,) and step.writes:
            args[0].mul_(factor)
        elif slot in given and factor != 1.0:
            changed[slot] = given[slot] * factor
    return replaced(args, changed), replaced(kwargs, changed)


def _computed(step: Step, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The result of a product times its factor, whose gradients are those of this function."""
    if step.op is None:
        output = called(function, args, kwargs)
        return output if step.factor == 1.0 else scale_each(output, step.factor, step.factor)
    op = OPS[step.op]
    if step.op in RECURRENT:
        return op.call(args, kwargs, func=function, weight_factor=False)
    constraint = tuple((name, step.factor) for name in step.names)
    return op.call(args, kwargs, func=function, constraint=constraint)
