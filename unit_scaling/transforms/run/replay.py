"""Executes a plan: a torch-function mode that takes the step of each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8.casts.measuring import MEASURING
from fp8.common.compiler import called
from fp8.common.threads import Stack
from fp8.modes.control_flow import RUNS
from fp8.modes.dispatch import COMPOSED
from fp8.products.active import ACTIVE, with_static

from ...rules.table import OPS
from ..install import Args, Called, Kwargs
from ..plan.plan import Step, Steps
from ..record.calls import Calls, tensors_in
from ..record.kinds import LAYERS, METHODS, PRODUCTS, RECURRENT, canonical
from ..record.place import Place, lines_here, lines_in_graph

if TYPE_CHECKING:
    from typing_extensions import Self

_COMPOSED = frozenset((*COMPOSED, *RUNS, torch.einsum))
"""Functions that may be composed of others."""

RUNNING = Stack()
"""The transforms that are running in this thread, innermost last: the innermost one acts."""


class Replay(Calls):
    """Executes a plan for a call of a module. steps: by default those of the transform."""

    def __init__(
        self, transform: Any, called: Called, steps: dict[Place, Steps] | None = None
    ) -> None:
        super().__init__()
        self.transform, self.called = transform, called
        self._steps = transform.plan.steps if steps is None else steps
        self._path = transform.path.items
        self._kinds = transform.kinds
        self._counts: dict[Place, int] = {}
        self._eager = not torch.compiler.is_compiling()
        self._records = self._eager and torch.is_grad_enabled()
        self.latest: Step | None = None  # the step of the previous call, for measuring
        self.place: Place | None = None  # that of the previous call

    def __enter__(self) -> Self:
        RUNNING.items.append(self.transform)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        RUNNING.items.pop()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Args = (), kwargs: Any = None
    ) -> Any:
        if not self._eager or function in _COMPOSED:
            return super().__torch_function__(function, types, args, kwargs)
        kind = self._kinds.get(function)
        if kind is None or self._busy or RUNNING.items[-1] is not self.transform:
            return function(*args, **kwargs) if kwargs else function(*args)
        self._busy = True
        try:
            return self._stepped(kind, function, args, kwargs or {})
        finally:
            self._busy = False

    def sees(self) -> bool:
        return not self._busy and RUNNING.items[-1] is self.transform

    def observe(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        kind = self._kinds.get(function)
        for method, kind_of_method, _ in () if self._eager else METHODS:
            if function is method:
                kind = kind_of_method
        if kind is None:
            return called(function, args, kwargs)
        return self._stepped(kind, function, args, kwargs)

    def _stepped(self, kind: str, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        # torch.export, without the compiler's trace, runs Python's own frames.
        traced = not self._eager and torch.compiler.is_dynamo_compiling()
        lines = lines_in_graph() if traced else lines_here()
        place = self._path[-1], kind, lines
        steps = self._steps.get(place)
        if steps is None:
            if not any(t.is_floating_point() for _, t in tensors_in((args, kwargs))):
                return called(function, args, kwargs)
            steps = self._unknown(place, function, args, kwargs)
        step = steps[0]
        if len(steps) > 1:
            number = self._counts.get(place, 0)
            self._counts[place] = number + 1
            step = steps[min(number, len(steps) - 1)]
        return self._taken(place, step, function, args, kwargs)

    def _unknown(self, place: Place, function: Any, args: Args, kwargs: Kwargs) -> Steps:
        steps: Steps = self.transform.learn(place, function, args, kwargs, self.called)
        return steps

    def _taken(
        self, place: Place, step: Step | None, function: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        self.latest, self.place = step, place
        gradient = None
        if place[1] in CAST and (ACTIVE.blocks or MEASURING.items):
            gradient = self.transform.gradients.of(place)
        if step is None and gradient is None:
            return called(function, args, kwargs)
        if self._records and step is not None and not torch.is_grad_enabled():
            self.transform.warn_inside(place, step, self.called[0])
        if step is not None and step.op == "replace":
            output = self.transform.replacements[function](*args, **kwargs)
            return args[0].copy_(output) if step.writes else output
        return take(step or Step(), function, args, kwargs, gradient, self._eager)


CAST = PRODUCTS | RECURRENT
"""The kinds whose operands and gradients are cast."""


def take(
    step: Step, function: Any, args: Args, kwargs: Kwargs, gradient: Any = None, eager: bool = True
) -> Any:
    """The result of a call of torch under its step. gradient: the static scale of its gradient."""
    if step.terms:
        return _weighted_sum(step, args, kwargs)
    if step.op in RECURRENT:
        compute = partial(OPS[step.op].call, func=function, weight_factor=False)
    elif step.op is None:
        compute = partial(called, function)
    elif ACTIVE.blocks or MEASURING.items:  # the factor is one of the product's
        constraint = tuple((name, step.factor) for name in step.names)
        compute = partial(OPS[step.op].call, func=function, constraint=constraint)
    elif step.op in LAYERS and not kwargs and len(args) > 1:
        return _layer(eager, step.factor, function, *args)
    else:
        return called(function, args, kwargs) * step.factor
    if not (step.static or gradient):
        return compute(args, kwargs)
    if step.static:
        args, kwargs = canonical(function, args, kwargs)
    tensors = dict((*tensors_in(args), *tensors_in(kwargs)))
    operands = [(tensors[slot], exponent) for slot, exponent in step.static if slot in tensors]
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


def _layer(
    eager: bool, factor: float, function: Any, input: Tensor, weight: Tensor, *rest: Any
) -> Any:
    """``factor`` times the result of a linear layer or convolution, by the multiplication that
    costs least: in a graph of the input, where the compiler fuses it with what computes that;
    else of the weight, or of the result of a few rows."""
    if eager and input.numel() < weight.numel():
        return function(input, weight, *rest) * factor
    if rest and rest[0] is not None:
        rest = (rest[0] * factor, *rest[1:])
    if not eager:
        return function(input * factor, weight, *rest)
    return function(input, weight * factor, *rest)
