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
from functools import cached_property
from typing import Any

from torch import Tensor

from fp8.common.step import tensors_within

from ...scale import has_gradient, scale_edge
from ..capture.record import Key, Slot, replaced, site, tensors_in
from ..capture.structure import Structure, part
from ..measure.ranks import agreed_once
from ..plan.actions import Placed, Plan, Settled

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


class Following:
    """Finds the steps of one run, and tracks the gauges of its tensors.

    structure: of the model. preserves: whether no value has a factor, and no parameter a gauge.
    names: of parameters by id; none while a plan is measured, which has no gauges yet. settle:
    updates ``settled``. model: its name in the agreements of processes.
    """

    def __init__(
        self,
        plan: Plan,
        settled: Settled,
        structure: Structure,
        preserves: bool,
        names: Mapping[int, str] | None = None,
        settle: Callable[[], None] = lambda: None,
        model: str = "",
    ) -> None:
        self._plan, self._settled = plan, settled
        self.preserves = preserves
        self._structure = structure
        self._names, self._settle, self._model = names or {}, settle, model
        self._gauges: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._siblings: dict[str, str] = {}
        #: The tensors that objects among the arguments hold, by id.
        self.within: dict[int, Tensor] = {}

    def find(self, key: Key) -> Placed | None:
        """The planned call that corresponds to a call; None if there is none.

        key: module path, kind, and the number of earlier calls of that kind in this run.
        """
        path, kind, _ = key
        if path in self._plan.counts and path not in self._settled.varying:
            return self._plan.calls.get(key)
        if path not in self._siblings:
            self._siblings[path] = path if path in self._paths else self._sibling(path)
        return self._plan.places.get((self._siblings[path], kind, site()))

    @cached_property
    def _paths(self) -> set[str]:
        return {path for path, _, _ in self._plan.places}

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
            if other is not None and self._are_alike(names[: i + 1], other.split(".")[: i + 1]):
                return other
        return path

    def _are_alike(self, one: list[str], other: list[str]) -> bool:
        first, second = (_relative(self._structure, ".".join(names)) for names in (one, other))
        return bool(first) and first == second

    def gauge(self, tensor: Tensor, planned: int = 0) -> int | None:
        """The gauge of a tensor; None if it is not tracked. A parameter without one gets
        ``planned``."""
        known = self._gauges.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        name = self._names.get(id(tensor))
        return None if name is None else self._of_parameter(name, planned)

    def _of_parameter(self, name: str, planned: int) -> int:
        known = self._plan.parameters
        if name not in known:
            self._settle()
            settled = self._settled.parameters.get(name)
            if settled is not None:
                known[name] = settled - (self._plan.outside or 0)
            else:
                own = {name: planned}
                known[name] = 0 if self.preserves else agreed_once(self._model, own)[name]
        return known[name]

    def enter(
        self, call: Placed | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int | None, tuple[Any, ...], dict[str, Any]]:
        """Returns (the gauge of the result, the arguments with corrected gradients).

        call: the planned one, None for a call without a step, which has the gauge of its first
        argument. args, kwargs: `canonical`.
        """
        given = [
            (slot, t) for slot, t in (*tensors_in(args), *tensors_in(kwargs)) if has_gradient(t)
        ]
        if call is None or call.gauge is None:
            result, moves = self._passed_on(given)
        else:
            result, moves = self._planned(call, given)
        changed = {s: scale_edge(t, 1.0, 2.0 ** moves[s]) for s, t in given if moves.get(s)}
        if not changed:
            return result, args, kwargs
        return result, replaced(args, changed), replaced(kwargs, changed)

    def _passed_on(self, given: list[tuple[Slot, Tensor]]) -> tuple[int | None, dict[Slot, int]]:
        known = {slot: g for slot, t in given if (g := self.gauge(t)) is not None}
        result = next(iter(known.values()), None)
        return result, {slot: g - (result or 0) for slot, g in known.items()}

    def _planned(
        self, call: Placed, given: list[tuple[Slot, Tensor]]
    ) -> tuple[int, dict[Slot, int]]:
        """A result that is written into an argument has the gauge of that argument.

        Without a factor for the gradient of an argument, its gauge is that of the result.
        """
        assert call.gauge is not None
        planned = dict.fromkeys((slot for slot, _ in given), call.gauge) | dict(call.sources)
        known = {s: g for s, t in given if (g := self.gauge(t, planned[s])) is not None}
        shift = next((known[s] - planned[s] for s in call.written if s in known), 0)
        return call.gauge + shift, {s: g - planned[s] - shift for s, g in known.items()}

    def outside(self, tensor: Tensor) -> int:
        """The gauge that calls of this run shall give to a tensor from outside: that of its own
        call, or 0 for one of an earlier run."""
        if self.gauge(tensor) is None:
            self.leave(0, tensor, ())
        return self.gauge(tensor) or 0

    def begin(self, given: Any) -> None:
        """Notes the gauge of arguments, and which tensors objects among them hold."""
        self.leave(self._plan.entry, given, ())
        held = [t for t in tensors_within(given) if has_gradient(t)]
        self.within = {id(t): t for t in held if self.gauge(t) is None}

    def leave(self, gauge: int | None, output: Any, args: tuple[Any, ...]) -> None:
        """Notes the gauge of the result of a call."""
        if gauge is None:
            return
        for _, tensor in tensors_in(args[:1] if output is None else output):
            if has_gradient(tensor):
                self._gauges[id(tensor)] = weakref.ref(tensor), gauge


def _pattern(names: list[str], i: int) -> tuple[str, ...]:
    return (*names[:i], "*", *names[i + 1 :])


def _relative(structure: Structure, path: str) -> dict[str, tuple[Any, ...]]:
    """The structure of the module at ``path``, with names relative to it."""
    return {
        name[len(path) :]: (kind, forward, parameters, children)
        for name, (kind, forward, _, parameters, children) in part(structure, path).items()
    }
