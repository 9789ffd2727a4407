"""Executes a plan: a torch-function mode that applies the step of each call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from fp8.common.compiler import called
from fp8.common.step import Writes
from fp8.common.threads import in_saving
from fp8.context.active import with_static

from ...rules.table import OPS
from ...scale import scale_edge
from ..capture.kinds import METHODS, RECURRENT, TRANSPARENT, canonical
from ..capture.record import Calls, Key, Slot, replaced, tensors_in
from ..plan.actions import Placed, Plan, Step
from .border import ending_call, is_outside, starting
from .install import HOOKS, Args, Given, Kwargs
from .varying import Following


class PlanMissError(RuntimeError):
    """The model made other calls than those in its plan. paths: the modules that made them."""

    def __init__(self, message: str, paths: Collection[str]) -> None:
        super().__init__(message)
        self.paths = frozenset(paths)


def _times(step: Step, args: Args, kwargs: Kwargs) -> Tensor:
    """Multiplies the tensor argument by the step's factor, in place of the number."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    value = tensors[0]
    for other in tensors[1:]:  # the number may be a one-element tensor
        value = other if other.ndim > value.ndim else value
    return value * step.factor


def _by_slot(args: Args, kwargs: Kwargs) -> dict[Slot, Tensor]:
    return dict((*tensors_in(args), *tensors_in(kwargs)))


_OF_ITSELF = {
    Tensor.register_hook,
    Tensor.retain_grad,
    *(getattr(Tensor, name).__get__ for name in ("grad", "grad_fn")),
}
"""Calls that concern the tensor itself, not a stand-in with another gradient."""


class Replay(Calls):
    """Executes ``plan``. kinds: the table of `capture.kinds`. replacements: torch function ->
    replacement, from `unit_scale`. path: the stack of running modules. following: for a model whose
    calls depend on values."""

    def __init__(
        self,
        plan: Plan,
        kinds: dict[Callable[..., Any], str],
        replacements: dict[Callable[..., Any], Callable[..., Any]],
        path: list[str],
        following: Following | None = None,
    ) -> None:
        super().__init__(plan.in_pairs)
        self._plan, self._steps = plan, plan.steps
        self._kinds = kinds
        self._replacements = replacements
        self._path = path
        self._following = following
        self._placed: Placed | None = None
        self.counts: dict[tuple[str, str], int] = {}
        self.latest: Step | None = None  # the step of the previous call, for measuring
        self.writes: Writes | None = None  # told of all calls

    def observe(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if self.writes is not None:
            self.writes.note(function, args, kwargs)
        kind = self._kind(function)
        step = None if kind is None else self._next(kind, args, kwargs)
        self.latest = step
        if self._following is None:
            return self._called(step, function, args, kwargs)
        return self._followed(self._following, step, function, args, kwargs)

    def _followed(
        self,
        following: Following,
        step: Step | None,
        function: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        placed, self._placed = self._placed, None
        if function in _OF_ITSELF or not torch.is_grad_enabled():
            return self._called(step, function, args, kwargs)
        args, kwargs = canonical(function, args, kwargs)
        given = (*tensors_in(args), *tensors_in(kwargs))
        outside = [(s, t) for s, t in given if is_outside(t) or id(t) in following.within]
        starts = [(slot, following.outside(t)) for slot, t in outside]
        gauge, args, kwargs = following.enter(placed, args, kwargs)
        args, kwargs = self._started(starts, args, kwargs)
        output = self._called(step, function, args, kwargs)
        kept = None if placed is None else placed.kept
        if kept is not None:
            given = (*args, *kwargs.values())
            output = ending_call(output, given, self._plan, gauge or 0, kept)
        following.leave(gauge, output, args)
        return output

    def _started(self, starts: Iterable[tuple[Slot, int]], args: Args, kwargs: Kwargs) -> Given:
        """The arguments, with those that are kept as from outside the model."""
        if not starts:
            return args, kwargs
        given = _by_slot(args, kwargs)
        changed = {s: starting(given[s], self._plan, gauge) for s, gauge in starts if s in given}
        return replaced(args, changed), replaced(kwargs, changed)

    def _called(
        self, step: Step | None, function: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> Any:
        if step is None:
            return called(function, args, kwargs)
        output = self._execute(step, function, args, kwargs)
        if step.end is None:
            return output
        return ending_call(output, (*args, *kwargs.values()), self._plan, *step.end)

    def _kind(self, function: Callable[..., Any]) -> str | None:
        if torch.compiler.is_compiling():
            for method, kind, _ in METHODS:
                if function is method:
                    return kind
        return self._kinds.get(function)

    def _next(self, kind: str, args: Args, kwargs: Kwargs) -> Step | None:
        path = self._path[-1]
        if path.endswith(HOOKS) or (kind == "detach" and in_saving()):
            return None
        count = self.counts.get((path, kind), 0)
        self.counts[path, kind] = count + 1
        key: Key = (path, kind, count)
        if self._following is not None:
            self._placed = self._following.find(key)
            if self._placed is not None:
                return self._placed.step
            if kind in TRANSPARENT or self._following.preserves:
                return None  # a call without factors, whatever branch it is in
        elif key in self._steps:
            return self._steps[key]
        if not any(t.dtype.is_floating_point for _, t in tensors_in((args, kwargs))):
            return None  # positions and masks have no scale
        other = "torch.export" if torch.compiler.is_exporting() else "the model"
        raise PlanMissError(
            f"unit_scale has not seen call {count} of {kind} in {path or 'the model itself'!r}: "
            f"{other} takes a branch that none of its recorded calls has taken. A branch that "
            "depends on values, as in a loss that leaves examples out, belongs outside of the "
            "model: recordings run without factors and casts, and may take another one",
            {path},
        )

    def check(self, varying: Collection[str], results: Collection[str] = ()) -> None:
        """Raises PlanMissError if modules that are not ``varying`` have other ``results``, or have
        made another number of calls than planned: the steps of later calls were not theirs."""
        other = self._plan.other_paths(self.counts) - set(varying) | set(results)
        if other:
            names = ", ".join(repr(path or "the model itself") for path in sorted(other)[:3])
            what = "another number of calls in, or other results of,"
            raise PlanMissError(f"unit_scale has seen {what} {names}", other)

    def _execute(self, step: Step, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if step.slots or step.starts:
            args, kwargs = canonical(function, args, kwargs)
        written = kwargs.get("out", args[0] if step.writes and args else None)
        args, kwargs = self._started(step.starts, args, kwargs)
        elsewhere = step.output != 1.0 or step.op in ("times", "replace")
        given, changed = _by_slot(args, kwargs) if step.slots else {}, {}
        for slot, fwd, bwd in step.slots:
            if slot == (0,) and args[0] is written and fwd == bwd:
                written.mul_(fwd)
            elif slot in given:
                elsewhere |= slot == (0,) and fwd != 1.0
                changed[slot] = scale_edge(given[slot], fwd, bwd)
            elif len(slot) == 1:  # a list may be shorter than planned
                path, what = self._path[-1], f"a tensor as argument {slot[0]!r} of a call"
                where = repr(path or "the model itself")
                raise PlanMissError(f"unit_scale has seen {what} in {where}", {path})
        if changed:
            args, kwargs = replaced(args, changed), replaced(kwargs, changed)
        if step.slots and kwargs.get("inplace"):  # autograd functions' outputs must not be written
            kwargs, elsewhere = {**kwargs, "inplace": False}, True
        if written is not None and elsewhere and args[0] is written and step.op != "times":
            args = (written.clone(), *args[1:])  # backward may need what is overwritten
        output = self._compute(step, function, args, kwargs)
        if step.output != 1.0 and isinstance(output, Tensor):
            output = output * step.output
        return output if written is None or not elsewhere else written.copy_(output)

    def _compute(self, step: Step, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if step.static:
            given = _by_slot(args, kwargs)
            operands = [(given[slot], exponent) for slot, exponent in step.static]
            return with_static(operands, function, args, kwargs)
        if step.op is None:
            return called(function, args, kwargs)
        if step.op == "replace":
            return self._replacements[function](*args, **kwargs)
        if step.op == "times":
            return _times(step, args, kwargs)
        if step.op == "linear_readout":
            return OPS["linear_readout"].fn(*args, **kwargs, constraint=step.constraint)
        settings = {"constraint": step.constraint, **dict(step.settings)}
        return OPS[step.op].call(args, kwargs, func=function, **settings)


def factor_after(step: Step, function: Callable[..., Any] | None, args: Any, kwargs: Any) -> float:
    """The factor applied to a product's result after its kernel, and to its gradient before the
    backward kernels; 1 if the kernels apply it."""
    if isinstance(step.constraint, tuple):
        return 1.0
    if step.op not in OPS or step.op in RECURRENT:
        return step.output
    rule = OPS[step.op].scales(args, kwargs, func=function, **dict(step.settings))
    return step.output * rule["output"]


def is_torch_function(function: Any) -> bool:
    """Whether calls of ``function`` are visible to torch-function modes."""
    listed = torch.overrides.get_overridable_functions().values()
    return callable(function) and any(function in functions for functions in listed)
