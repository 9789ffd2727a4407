"""Regions: calls that together mean what they mean for the values of the model only.

They run as in the model, with the values that its weights had, and results that leave the region
for the rest of the model have a factor: a measured one (`measure.measuring`), or none if the next
pass of a loop reads them, or if a call that writes into its argument computes them.

Formulas of matrices and states carried by a loop are closed: with a call, everything it is computed
from since the last layer belongs to the region, and everything computed from the region alone up to
the next layer or activation. Other regions are in `plan.patterns` and `plan.interior`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..capture.dataflow import Flow, components, reached
from ..capture.kinds import ALGEBRA, CASTS, ELEMENTWISE
from ..capture.record import Place
from .interior import Interior
from .matrices import ADDS, ENDS, Matrices

_MULTIPLY = frozenset("mul div lerp addcmul addcdiv".split())
_ARITHMETIC = ELEMENTWISE - CASTS | _MULTIPLY
_ACTIVATIONS = frozenset(
    "relu relu6 leaky_relu rrelu elu selu celu gelu silu mish hardswish softplus hardtanh".split()
)
"""Functions of a result of a region, which expect RMS 1."""


@dataclass(frozen=True)
class Region:
    """Calls that run as in the model. what: names it in the report. exits: the calls whose results
    have a factor. factor: that of the results; None for a measured one."""

    calls: frozenset[int]
    what: str
    exits: frozenset[int] = frozenset()
    factor: float | None = None


class Regions:
    """The closed regions of a model."""

    def __init__(self, flow: Flow, interior: Interior) -> None:
        self.flow = flow
        self.matrices = Matrices(flow)
        self._outside = set[int]()  # calls that belong to no region
        self._body = set[int]()  # calls that repeat at their places
        self._carried = set[Place]()  # whose results the next pass of a loop reads
        self._feeding = flow.before(filter(flow.is_product, range(len(flow.nodes))))
        self._feeding &= interior.calls
        self._members: dict[Place, list[int]] = defaultdict(list)
        for index, node in enumerate(flow.nodes):
            if node.function is not None and node.live and not node.computed:
                self._members[node.place].append(index)

    def formulas(self) -> list[Region]:
        """The formulas of matrices."""
        return self._split(self._closed(self.matrices.seeds()), "formula of matrices")

    def loops(self, adds: Iterable[int], known: dict[Place, str]) -> list[Region]:
        """The states that Python loops carry from one pass to the next: ``s = a * s + b``.

        A factor at each pass would be raised to the power of their number. Seeds are the calls that
        repeat at the same place and depend on their own earlier results without a product in
        between. Of a running sum, the adds alone are a region.

        adds: residual adds, which are excluded. known: the places of such loops in other forms of
        call; those of this flow are added. Each with "state" or "sum" if the next pass reads the
        result, or "".
        """
        flow, members = self.flow, self._members
        self._outside.update(adds)
        for cycle in _cycles(flow, members):
            inside = {i for place in cycle for i in members[place]}
            kinds = {kind for _, kind, _ in cycle} & _ARITHMETIC
            if kinds and not any(i in self._outside or flow.is_product(i) for i in inside):
                role = "sum" if kinds <= ADDS else "state"
                known.update({place: role for place in members if place in cycle})
        self._body = {i for calls in members.values() if len(calls) > 1 for i in calls}
        self._carried = {place for place, role in known.items() if role}
        calls = {i: role for place, role in known.items() for i in members.get(place, ())}
        sums = {i for i, role in calls.items() if role == "sum"} - self._outside
        closed = self._closed(calls.keys() - sums - self._outside)
        for index in sorted(closed & self._body):
            known.setdefault(flow.nodes[index].place, "")
        return self._split(closed | sums, "value carried by a loop")

    def _split(self, calls: set[int], what: str) -> list[Region]:
        """Connected regions of these calls."""
        flow, nodes = self.flow, self.flow.nodes
        # No other call of the region, or pass of its loop, reads what leaves it for products.
        exits = {i for i in calls & self._feeding if calls.isdisjoint(flow.readers[i])}
        exits -= {i for i in exits if nodes[i].written or nodes[i].place in self._carried}
        near = {i: calls.intersection(flow.sources[i] + flow.readers[i]) for i in sorted(calls)}
        return [Region(part, what, part & exits) for part in components(near)]

    def _closed(self, seeds: set[int]) -> set[int]:
        flow, found, todo = self.flow, set[int](), seeds
        while todo:
            found |= todo
            found = reached(found, lambda i: filter(self._is_above, flow.sources[i]))
            again = {j for i in found for j in self._members.get(flow.nodes[i].place, ())}
            below = {j for i in found for j in flow.readers[i] if self._is_below(j, found)}
            todo = (again | below) - found - self._outside
        return found

    def _is_above(self, index: int) -> bool:
        """Whether a region extends above one of its calls."""
        kind, matrices = self.flow.nodes[index].kind, self.matrices
        if index in self._outside:
            return False
        if index in matrices.powers or kind in ENDS:
            return True
        if kind not in ADDS or not matrices.is_formed(index):
            return matrices.is_formed(index)
        first, *others = matrices.origins(index)
        dependent = not others or any(first & other for other in others)
        return dependent or all(
            map(matrices.is_formed, map(matrices.base, self.flow.sources[index]))
        )

    def _is_below(self, reader: int, found: set[int]) -> bool:
        """Whether a region extends to a call that reads one of its calls."""
        kind, is_formed = self.flow.nodes[reader].kind, self.matrices.is_formed
        if reader in self.matrices.powers or (reader in self._body and is_formed(reader)):
            return True
        known = kind in ALGEBRA or (is_formed(reader) and kind not in _ACTIVATIONS)
        return known and found.issuperset(self.flow.sources[reader])


def _cycles(flow: Flow, members: dict[Place, list[int]]) -> list[set[Place]]:
    """The sets of places whose calls depend on each other's earlier results."""

    def near(edges: list[list[int]]) -> dict[Place, set[Place]]:
        found = {p: {flow.nodes[j].place for i in members[p] for j in edges[i]} for p in members}
        return {place: {p for p in places if p in members} for place, places in found.items()}

    below, above = near(flow.readers), near(flow.sources)
    found: list[set[Place]] = []
    for place, calls in members.items():
        if len(calls) > 1 and not any(place in cycle for cycle in found):
            ends = (reached(edges[place], edges.__getitem__) for edges in (below, above))
            cycle = set.intersection(*ends)
            found += [cycle] if cycle else []
    return found
