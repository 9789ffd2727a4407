"""Steps and gauges for models whose calls depend on values: experts that a router chooses, loops of
any length, layers that are skipped.

A plan lists the calls of one run in order. In a module whose number of calls varies, a call has the
step of the first call at the same place of the code, and in a submodule that the recorded run did
not call, that of a sibling of the same structure. Regions of gradients may then meet others than in
the recorded run. The gauge of each tensor is therefore tracked, and where an argument has another
one than planned, its gradient is multiplied by the power of two between them. Every parameter's
gradient remains the true one times a power of two of its own, whatever calls are made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from fp8.common.step import tensors_within

from ...scale import has_gradient, scale_edge
from ..capture.record import Key, replaced, site, tensors_in
from ..capture.structure import Structure, part
from ..measure.ranks import agreed_once
from ..plan.actions import Placed, Plan, Settled
from .install import Args, Kwargs

VARIES = (
    "the number of calls that the model makes depends on values, so unit_scale tracks the gauges "
    "of its tensors, which no graph can: it runs without torch.compile"
)

ON_ITS_OWN = (
    "{!r} is called on its own in training, under the plan of the whole model: unit_scale tracks "
    "the gauges of its tensors, which no graph can, so this call runs without torch.compile"
)

REENTRANT = (
    "the calls of the model depend on values, so unit_scale tracks the gauges of its tensors, "
    "which an autograd function hides that computes parts of the model again: for a checkpoint, "
    "use_reentrant=False"
)


@dataclass(eq=False, repr=False)
class Following:
    """Finds the steps of one run, and tracks the gauges of its tensors. structure: of the model.
    preserves: whether no value has a factor, and no parameter a gauge. names: of parameters by id;
    none while a plan is measured, which has no gauges yet. settle: updates ``settled``. model: its
    name in the agreements of processes. within: tensors that objects among the arguments hold."""

    plan: Plan
    settled: Settled
    structure: Structure
    preserves: bool
    names: Mapping[int, str] = field(default_factory=dict)
    settle: Callable[[], None] = lambda: None
    model: str = ""
    within: dict[int, Tensor] = field(default_factory=dict)
    _gauges: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    _siblings: dict[str, str] = field(default_factory=dict)

    def find(self, key: Key) -> Placed | None:
        """The planned call that corresponds to a call of this run; None if there is none."""
        path, kind, _ = key
        if path in self.plan.counts and path not in self.settled.varying:
            return self.plan.calls.get(key)
        if path not in self._siblings:
            self._siblings[path] = path if path in self._paths else self._sibling(path)
        return self.plan.places.get((self._siblings[path], kind, site()))

    @cached_property
    def _paths(self) -> set[str]:
        return {path for path, _, _ in self.plan.places}

    @cached_property
    def _by_pattern(self) -> dict[tuple[str, ...], str]:
        """Path with one name replaced by "*" -> the first path of a call that matches it."""
        found: dict[tuple[str, ...], str] = {}
        for path in self._paths:
            names = path.split(".")
            for i in range(len(names)):
                found.setdefault(_pattern(names, i), path)
        return found

    def _sibling(self, path: str) -> str:
        """The path of a planned module that differs in one name and has the same structure."""
        names = path.split(".")
        for i in reversed(range(len(names))):
            other = self._by_pattern.get(_pattern(names, i))
            if other is not None:
                own = self._relative(names[: i + 1])
                if own and own == self._relative(other.split(".")[: i + 1]):
                    return other
        return path

    def _relative(self, names: list[str]) -> dict[str, tuple[Any, ...]]:
        """The structure of a module, with names relative to it."""
        path = ".".join(names)
        found = part(self.structure, path).items()
        return {name[len(path) :]: (*entry[:2], *entry[3:]) for name, entry in found}

    def gauge(self, tensor: Tensor, planned: int = 0) -> int | None:
        """The gauge of a tensor; None if it is not tracked. A parameter without one gets
        ``planned``."""
        tracked = self._gauges.get(id(tensor))
        if tracked is not None and tracked[0]() is tensor:
            return tracked[1]
        name, known = self.names.get(id(tensor)), self.plan.parameters
        if name is None:
            return None
        if name not in known:
            self.settle()
            if (settled := self.settled.parameters.get(name)) is not None:
                known[name] = settled - (self.plan.outside or 0)
            else:
                own = {name: planned}
                known[name] = 0 if self.preserves else agreed_once(self.model, own)[name]
        return known[name]

    def enter(
        self, call: Placed | None, args: Args, kwargs: Kwargs
    ) -> tuple[int | None, Args, Kwargs]:
        """Returns (the gauge of the result, the arguments with corrected gradients). call: the
        planned one, None for a call without a step, which has the gauge of its first argument. A
        result that is written into an argument has that of the argument. args: `canonical`."""
        given = [*tensors_in(args), *tensors_in(kwargs)]
        given = [(slot, t) for slot, t in given if has_gradient(t)]
        planned = None if call is None else call.gauge
        sources = {} if call is None or planned is None else dict(call.sources)
        moved = {}
        for slot, tensor in given:
            # Without a factor for the gradient of an argument, its gauge is that of the result.
            own = sources.get(slot, planned or 0)
            if (gauge := self.gauge(tensor, own)) is not None:
                moved[slot] = gauge - own
        written = moved if call is None or planned is None else call.written
        shift = next((moved[slot] for slot in written if slot in moved), 0)
        result = None if planned is None and not moved else (planned or 0) + shift
        factors = {slot: 2.0 ** (move - shift) for slot, move in moved.items() if move != shift}
        changed = {s: scale_edge(t, 1.0, factors[s]) for s, t in given if s in factors}
        if not changed:
            return result, args, kwargs
        return result, replaced(args, changed), replaced(kwargs, changed)

    def outside(self, tensor: Tensor) -> int:
        """The gauge that calls of this run shall give to a tensor from outside: that of its own
        call, or 0 for one of an earlier run."""
        if self.gauge(tensor) is None:
            self.leave(0, tensor, ())
        return self.gauge(tensor) or 0

    def begin(self, given: Any) -> None:
        """Notes the gauge of arguments, and which tensors objects among them hold."""
        self.leave(self.plan.entry, given, ())
        held = [t for t in tensors_within(given) if has_gradient(t)]
        self.within = {id(t): t for t in held if self.gauge(t) is None}

    def leave(self, gauge: int | None, output: Any, args: Args) -> None:
        """Notes the gauge of the result of a call."""
        if gauge is None:
            return
        for _, tensor in tensors_in(args[:1] if output is None else output):
            if has_gradient(tensor):
                self._gauges[id(tensor)] = weakref.ref(tensor), gauge


def _pattern(names: list[str], i: int) -> tuple[str, ...]:
    return (*names[:i], "*", *names[i + 1 :])
