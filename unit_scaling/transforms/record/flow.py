"""The flow of values through a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .calls import CallNode, Input
from .kinds import PRODUCTS, RECURRENT


def reached(
    starts: Iterable[int],
    next: Callable[[int], Iterable[int]],
) -> set[int]:
    """All nodes reachable from ``starts`` along ``next``, including ``starts``."""
    found = set(starts)
    todo = list(found)
    while todo:
        new = set(next(todo.pop())) - found
        found |= new
        todo += new
    return found


class Flow:
    """The value graph of a recorded run. Nodes are indices, in topological order. A tensor computed
    from parameters alone (a tied, masked or normalised weight) is a weight, not a value."""

    def __init__(self, nodes: list[CallNode]) -> None:
        self.nodes = nodes
        self.sources = list(map(self._sources, nodes))
        self.readers: list[list[int]] = [[] for _ in nodes]
        for index, sources in enumerate(self.sources):
            for source in sources:
                self.readers[source].append(index)

    def _sources(self, node: CallNode) -> list[int]:
        if not node.is_value:
            return []
        inputs = dict.fromkeys(i.node for i in node.inputs)
        return [i for i in inputs if self.nodes[i].is_value]

    def origin(self, i: Input) -> str | None:
        """The name of the parameter that an argument is, or is a view or a copy of."""
        return self.nodes[i.node].origin

    def values(self, index: int) -> list[Input]:
        """The arguments of a call that are values."""
        return [i for i in self.nodes[index].inputs if i.node in self.sources[index]]

    def is_product(self, index: int) -> bool:
        """Whether a call is a product of values."""
        node = self.nodes[index]
        return node.kind in PRODUCTS | RECURRENT and node.live

    def before(self, ends: Iterable[int]) -> set[int]:
        """The nodes whose results feed one of the calls ``ends``."""
        starts = [source for end in ends for source in self.sources[end]]
        return reached(starts, self.sources.__getitem__)

    def between(self, start: int, end: int) -> list[int]:
        """The nodes on all paths from ``start`` (excluded) to ``end``, in order."""

        def back(index: int) -> list[int]:
            return [source for source in self.sources[index] if source >= start]

        above = reached([end], back)
        if start not in above or start == end:
            return []
        below = {start}
        for index in sorted(above):
            if not below.isdisjoint(self.sources[index]):
                below.add(index)
        return sorted(below - {start})
