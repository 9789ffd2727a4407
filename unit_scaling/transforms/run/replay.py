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
from ..install import Args, Kwargs
from ..plan.plan import ModelPlan, Step, Steps
from ..record.calls import Calls, tensors_in
from ..record.kinds import LAYERS, METHODS, PRODUCTS, RECURRENT, canonical
from ..record.place import Place, lines_here
from .gradients import GradientScales


class Planned(Protocol):
    """The part of `run.transform.UnitScale` that a run uses."""

    gradients: GradientScales

    @property
    def plan(self) -> ModelPlan: ...
    @property
    def kinds(self) -> Mapping[Callable[..., Any], str]: ...
    @property
    def stepped(self) -> Mapping[str, Any]: ...
    @property
    def handled(self) -> Mapping[Callable[..., Any], str]: ...
    @property
    def replacements(self) -> Mapping[Callable[..., Any], Callable[..., Any]]: ...

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
        self._eager = not torch.compiler.is_compiling()
        self.latest: Step | None = None  # the step of the previous call, for measuring
        self.place: Place | None = None  # that of the previous call

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Args = (), kwargs: Any = None
    ) -> Any:
        if not self._eager:
            return super().__torch_function__(function, types, args, kwargs)
        kind = self._planned.handled.get(function)
        if kind is None or self._busy or RUNNING.items[-1] is not self._owner:
            return function(*args, **kwargs) if kwargs else function(*args)
        if not kind:
            return super().__torch_function__(function, types, args, kwargs)
        self._busy = True
        try:
            return self._stepped(kind, function, args, kwargs or {})
        finally:
            self._busy = False

    def gradient_scale(self) -> Tensor | None:
        """The static scale of the gradient of the previous call, if a gradient has set one."""
        return None if self.place is None else self._planned.gradients.tensors().get(self.place)

    def sees(self) -> bool:
        return not self._busy and RUNNING.items[-1] is self._owner

    def observe(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        kind = self._kind(function) or ""
        if kind not in self._planned.stepped:
            return called(function, args, kwargs)
        return self._stepped(kind, function, args, kwargs)

    def _stepped(self, kind: str, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """The result of a call of a kind that may have a step."""
        place = self._path[-1], kind, lines_here()
        steps = self._planned.plan.steps.get(place)
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
        self.latest, self.place = step, place
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
    if step.terms:
        return _weighted_sum(step, args, kwargs)
    if not (step.static or gradient):
        return _product(step, function, args, kwargs)
    if step.static:
        args, kwargs = canonical(function, args, kwargs)
    given = dict((*tensors_in(args), *tensors_in(kwargs)))
    operands = [(given[slot], exponent) for slot, exponent in step.static if slot in given]
    compute = partial(_product, step, function)
    return with_static(operands, gradient, lambda *a, **k: compute(a, k), args, kwargs)


def _weighted_sum(step: Step, args: Args, kwargs: Kwargs) -> Any:
    first, second = step.terms
    x, y = args if len(args) == 2 else (t for _, t in tensors_in((args, kwargs)))
    if kwargs:
        second *= kwargs.get("alpha", 1)
    if step.writes:
        return x.mul_(first).add_(y, alpha=second)
    total = torch.add(x * first, y, alpha=second)
    return total if kwargs.get("out") is None else kwargs["out"].copy_(total)


def _product(step: Step, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The result of a product times its factor, whose gradients are those of this function."""
    if step.op is None:
        return called(function, args, kwargs)
    op = OPS[step.op]
    if step.op in RECURRENT:
        return op.call(args, kwargs, func=function, weight_factor=False)
    if ACTIVE.blocks or MEASURING.items:  # the factor is one of the product's
        constraint = tuple((name, step.factor) for name in step.names)
        return op.call(args, kwargs, func=function, constraint=constraint)
    if step.op in LAYERS and not kwargs and len(args) > 1:
        return _layer(step.factor, function, *args)
    return called(function, args, kwargs) * step.factor


def _layer(
    factor: float, function: Callable[..., Any], input: Tensor, weight: Tensor, *rest: Any
) -> Any:
    """``factor`` times the result of a linear layer or convolution, by the multiplication that
    costs least: in a graph of the input, where the compiler fuses it with what computes that;
    else of the weight, or of the result of a few rows."""
    if input.numel() < weight.numel() and not torch.compiler.is_compiling():
        return function(input, weight, *rest) * factor
    if rest and rest[0] is not None:
        rest = (rest[0] * factor, *rest[1:])
    if torch.compiler.is_compiling():
        return function(input * factor, weight, *rest)
    return function(input, weight * factor, *rest)
