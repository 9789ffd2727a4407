"""States that a Python loop carries from one position to the next: ``s = a * s + b``.

A factor at each iteration would be raised to the power of the number of iterations: the state would
decay or grow. Calls that repeat at the same place and depend on their own earlier results without a
product in between therefore keep their values, and so do:

1. the rest of the loop: functions of the state, and linear calls in front of them;
2. gates: what multiplies the state, up to the products that compute it.

A loop around products (a recurrent cell, layers) is an ordinary network and is scaled. A running
sum of terms that is read only at its end is one sum and gets one factor. If it is read or written
in parts (of experts, for example) it has no factor, and its terms keep equal weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import pairwise

from fp8.common.report import LEFT_ALONE

from ..capture.dataflow import Flow, reached
from ..capture.kinds import AVERAGES, CASTS, ELEMENTWISE, LINEAR, MOVES
from ..capture.record import Place
from .actions import Kept
from .interior import Interior

__all__ = ["Carried"]

_MULTIPLY = frozenset("mul div lerp addcmul addcdiv".split())
_ARITHMETIC = ELEMENTWISE - CASTS | _MULTIPLY
_ADDS = frozenset(["add", "sub"])
_FORMED = _ARITHMETIC | MOVES
_SUMS = frozenset("sum norm vector_norm amax cumsum softmax normalize".split())
_GATES = _FORMED | AVERAGES | _SUMS

_PARTS = Kept("unchanged", "a running sum in parts: its terms keep one weight")
_STATE = Kept(LEFT_ALONE, "a state carried through a loop: keeps its values")


class Carried:
    """The calls that are not scaled individually, because a loop carries their results.

    interior: outside of it, sums are not scaled. adds: the residual adds of the flow, which are
    excluded. known: place -> loop, of other call signatures; the loops of this flow are added, as a
    single pass must compute what the loop does.
    """

    def __init__(
        self, flow: Flow, interior: Interior, adds: Collection[int], known: dict[Place, int]
    ) -> None:
        self.flow, self._interior = flow, interior
        self._sums: dict[int, int] = {}  # call of a running sum -> number of terms if last, else 1
        self._members: dict[Place, list[int]] = defaultdict(list)
        for index, node in enumerate(flow.nodes):
            if node.function is not None and node.live and not node.computed:
                self._members[node.place].append(index)
        self._scaled = {flow.nodes[index].place for index in adds}
        cycles = self._cycles()
        states = [cycle for cycle in cycles if self._is_state(cycle)]
        self._scaled |= {place for cycle in cycles if cycle not in states for place in cycle}
        for cycle in states:
            if not self._is_sum(cycle) and not cycle <= known.keys():
                loop = len(known)
                around = cycle if _is_plain(cycle) else self._around(cycle)
                known.update({p: loop for p in around if p not in known})
        self._known = known

    def kept(self) -> dict[int, Kept]:
        """What the plan does with these calls; the first one of a loop has a row in the report."""
        states = {loop for p, loop in self._known.items() if not _is_plain({p})}
        loops = {i: loop for p, loop in self._known.items() for i in self._members.get(p, ())}
        found, told = dict[int, Kept](), set[int]()
        for index, loop in sorted(loops.items()):
            found[index] = Kept("", "")
            if self.flow.nodes[index].kind in _ARITHMETIC and loop not in told:
                told.add(loop)
                found[index] = _STATE if loop in states else _PARTS
        for index, count in self._sums.items():
            why = f"a running sum of {count} terms"
            found[index] = Kept("scaled", why, count**-0.5) if count > 1 else Kept("", "")
        return found

    def _cycles(self) -> list[set[Place]]:
        """The sets of places whose calls depend on each other's earlier results."""
        below = {p: set(self._places(m, self.flow.readers)) for p, m in self._members.items()}
        above = {p: set(self._places(m, self.flow.sources)) for p, m in self._members.items()}
        found: list[set[Place]] = []
        for place, calls in self._members.items():
            if len(calls) > 1 and not any(place in cycle for cycle in found):
                ends = (reached(near[place], near.__getitem__) for near in (below, above))
                cycle = set.intersection(*ends)
                found += [cycle] if cycle else []
        return found

    def _places(self, calls: Iterable[int], edges: list[list[int]]) -> list[Place]:
        found = (self.flow.nodes[other].place for call in calls for other in edges[call])
        return [place for place in found if place in self._members]

    def _is_state(self, cycle: set[Place]) -> bool:
        product = any(self.flow.is_product(i) for place in cycle for i in self._members[place])
        kinds = {kind for _, kind, _ in cycle}
        return not product and bool(kinds & _ARITHMETIC) and not cycle & self._scaled

    def _is_sum(self, cycle: set[Place]) -> bool:
        """Whether a cycle is a running sum that nothing else reads; records its factor if so."""
        calls = [i for place in cycle for i in self._members[place]]
        chain = all(self.flow.readers[a] == [b] for a, b in pairwise(calls))
        if len(cycle) > 1 or self.flow.nodes[calls[0]].kind != "add" or not chain:
            return False
        if self.flow.nodes[calls[-1]].numel > 1 and not self.flow.data[calls[-1]]:
            terms = 1 + sum(len(self.flow.sources[i]) > 1 for i in calls)
            sums = dict.fromkeys(calls, 1) | {calls[-1]: terms}
            self._sums |= {i: count for i, count in sums.items() if i in self._interior}
        return True

    def _around(self, cycle: set[Place]) -> set[Place]:
        """The places of a loop that keep their values: the state, its functions and its gates."""

        def near(place: Place) -> set[Place]:
            calls = self._members[place]
            found = [p for p in self._places(calls, self.flow.readers) if p[1] in _FORMED]
            found += [p for p in self._places(calls, self.flow.sources) if p[1] in LINEAR | MOVES]
            return {p for p in found if len(self._members[p]) > 1} - self._scaled

        def gates(place: Place) -> set[Place]:
            above = self._places(self._members[place], self.flow.sources)
            return {p for p in above if p[1] in _GATES} - cycle - self._scaled

        return reached(cycle, near) | reached([p for p in cycle if p[1] in _MULTIPLY], gates)


def _is_plain(places: set[Place]) -> bool:
    """Whether the calls at these places only add and move."""
    return not {kind for _, kind, _ in places} & (_ARITHMETIC - _ADDS)
