"""Queries on recorded calls: dependencies and paths.

Values flow along *live* edges: those along which gradients propagate between calls. A tensor
computed from parameters alone (a tied, masked or normalised weight) is a weight, not a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from .calls import CallNode, Input
from .kinds import ATTENTION, PRODUCTS, RECURRENT, TRANSPARENT

T = TypeVar("T")

_MASKS = frozenset("masked_fill where nan_to_num".split())
"""Kinds that set elements to constants: those of rows of attention weights without any key."""


def reached(starts: Iterable[T], next: Callable[[T], Iterable[T]]) -> set[T]:
    """All items reachable from ``starts`` along ``next``, including ``starts``."""
    found = set(starts)
    todo = list(found)
    while todo:
        new = set(next(todo.pop())) - found
        found |= new
        todo += new
    return found


class Flow:
    """The value graph of a recorded run. Nodes are indices, in topological order."""

    def __init__(self, nodes: list[CallNode]) -> None:
        self.nodes = nodes
        self.sources = [self._sources(node) for node in self.nodes]
        self.readers: list[list[int]] = [[] for _ in self.nodes]
        for index, sources in enumerate(self.sources):
            for source in sources:
                self.readers[source].append(index)

    def _sources(self, node: CallNode) -> list[int]:
        if not node.value.live or node.value.computed:
            return []
        inputs = dict.fromkeys(i.node for i in node.inputs)
        return [i for i in inputs if self.nodes[i].value.live and not self.nodes[i].value.computed]

    def values(self, index: int) -> list[Input]:
        return [i for i in self.nodes[index].inputs if i.node in self.sources[index]]

    def is_product(self, index: int) -> bool:
        return self.nodes[index].kind in PRODUCTS | RECURRENT and self.nodes[index].value.live

    def is_attention(self, index: int) -> bool:
        """Whether the call is fused attention, or the softmax in front of a product."""
        kind = self.nodes[index].kind
        return kind in ATTENTION or (kind == "softmax" and self.weighs(index) is not None)

    def weighs(self, index: int) -> int | None:
        """The product that uses the result of a call as an operand, through moves, dropout and
        masks only; None if there is none."""
        for reader in self.readers[index]:
            if self.is_product(reader):
                return reader
            if self.nodes[reader].kind in TRANSPARENT | _MASKS:
                found = self.weighs(reader)
                if found is not None:
                    return found
        return None

    def before(self, ends: Iterable[int]) -> set[int]:
        """The nodes whose results feed one of the calls ``ends``."""
        return reached([s for end in ends for s in self.sources[end]], self.sources.__getitem__)

    def between(self, start: int, end: int) -> list[int]:
        """The nodes on all paths from ``start`` (excluded) to ``end``, in order."""
        above = reached([end], lambda index: [s for s in self.sources[index] if s >= start])
        if start not in above or start == end:
            return []
        found = {start}
        for index in sorted(above):
            if any(source in found for source in self.sources[index]):
                found.add(index)
        return sorted(found - {start})

    def up(self, index: int, kinds: Iterable[str]) -> int | None:
        """The only source of a call of one of these kinds; None otherwise."""
        sources = self.sources[index]
        return sources[0] if self.nodes[index].kind in kinds and len(sources) == 1 else None
