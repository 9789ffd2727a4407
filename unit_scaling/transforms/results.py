"""What a model computes after its last product: its results.

Those that mean something by their range (a probability, a pixel, a width, a direction) keep their
values, as nothing multiplies them any more; their gradient alone is scaled. So do those of which a
logarithm is taken, wherever else they go. A gate, which is multiplied with another value, is no
result.
"""

from __future__ import annotations

from collections.abc import Iterable

from .calls import ELEMENTWISE, LINEAR, RANGED, TRANSPARENT
from .flow import Flow

__all__ = ["KEEPS", "Results"]

KEEPS = "after the last product: keeps its values, gradient only"
"""What the report says of a result."""


_LOGARITHMS = frozenset("log log2 log10 log1p logit atanh arctanh acos arccos asin arcsin".split())
"""Names of logarithms, and of what else has values in a range only."""


class Results:
    """The results of a model. adds: its residual adds. whole: False for a part of a model, which
    has none. mixes: for each node, whether it goes on into products or residual connections.
    """

    def __init__(self, flow: Flow, adds: Iterable[int], whole: bool) -> None:
        self.flow = flow
        self.whole = whole
        self.mixes = self._before({*adds, *filter(flow.is_product, range(len(flow.nodes)))})
        self._gated = self._before({i for i in range(len(flow.nodes)) if self._is_gated(i)})

    def _before(self, ends: set[int]) -> list[bool]:
        """For each node, whether its result goes on into one of these calls."""
        before = [False] * len(self.flow.nodes)
        for index in reversed(range(len(before))):
            for source in self.flow.sources[index]:
                before[source] = before[source] or before[index] or index in ends
        return before

    def _is_gated(self, index: int) -> bool:
        return self.flow.nodes[index].kind == "mul" and len(self.flow.sources[index]) > 1

    def __contains__(self, index: int) -> bool:
        inner = self.mixes[index] or self._gated[index] or self.flow.data[index]
        return self.whole and not inner

    def is_ranged(self, calls: tuple[int, ...]) -> bool:
        """Whether calls are a function with a range and linear ones: ``(tanh(x) + 1) / 2``."""
        kinds = {self.flow.nodes[call].kind for call in calls} - LINEAR
        chain = all(len(self.flow.sources[call]) == 1 for call in calls)
        if not (chain and bool(kinds) and kinds <= RANGED):
            return False
        return calls[-1] in self or (self.whole and self.is_logged(calls[-1]))

    def is_logged(self, index: int) -> bool:
        """Whether a logarithm is taken of a value, or of what is computed from each element of it:
        ``log(1 - tanh(x)**2)`` has no value for a larger one.
        """
        nodes, seen, todo = self.flow.nodes, {index}, [index]
        while todo:
            new = set(self.flow.readers[todo.pop()]) - seen
            if any(nodes[i].name.rstrip("_") in _LOGARITHMS for i in new):
                return True
            new = {i for i in new if nodes[i].kind in TRANSPARENT | ELEMENTWISE}
            seen |= new
            todo += new
        return False
