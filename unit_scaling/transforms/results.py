"""What a model computes after its last product: its results, and the loss that it writes out.

Those that mean something by their range (a probability, a pixel, a width, a direction) keep their
values, as nothing multiplies them any more; their gradient alone is scaled. So do those of which a
logarithm is taken, wherever else they go. A gate, which is multiplied with another value, is no
result.

A loss that is written out, ``((y - target)**2).mean()``, stays what it is, as the losses of torch
do in `functional`: its *terms* are the arithmetic from the last product, or from log-probabilities,
to a number without dimensions. They keep their values, so that its parts keep their weights too.
"""

from __future__ import annotations

from collections.abc import Collection

from ..ops import find_op
from .calls import ELEMENTWISE, LINEAR, MOVES, RANGED, TRANSPARENT
from .flow import Flow, reached
from .meant import Meant
from .record import DISTRIBUTION
from .steps import Decision, Scaling, Step, with_slots

__all__ = ["KEEPS", "Results"]

KEEPS = "after the last product: keeps its values, gradient only"
TERM = "in a loss that is written out: keeps its values"
"""What the report says of a result."""


_LOGARITHMS = frozenset("log log2 log10 log1p logit atanh arctanh acos arccos asin arcsin".split())
"""Names of logarithms, and of what else has values in a range only."""

_TERMS = (
    ELEMENTWISE
    | MOVES
    | frozenset(
        (
            "mean sum var std norm vector_norm logsumexp gather softmax log_softmax normalize "
            "cosine_similarity min max amin amax where masked_fill"
        ).split()
    )
)
"""Kinds that a loss is written out in."""


class Results:
    """The results of a model. adds: its residual adds. whole: False for a part of a model, which
    has none. mixes: for each node, whether it goes on into products or residual connections.
    meant: the values after the last product that are in units. terms: the calls of a loss that is
    written out.
    """

    def __init__(self, flow: Flow, adds: Collection[int], whole: bool) -> None:
        self.flow = flow
        self.whole = whole
        mixing = {*adds, *filter(flow.is_product, range(len(flow.nodes)))}
        self.mixes = self._before(mixing)
        self.meant = Meant(flow, adds, self.mixes, whole)
        self._goes_on = self._before(mixing - self.meant.products)
        self._gated = self._before({i for i in range(len(flow.nodes)) if self._is_gated(i)})
        self.terms: set[int] = set()
        for index in reversed(range(len(flow.nodes)) if whole else ()):
            if index not in adds and self._is_term(index):
                self.terms.add(index)
        # Terms keep their values too, and have gradients of their own.
        self.meant.calls -= self.terms

    def _before(self, ends: set[int]) -> list[bool]:
        """For each node, whether its result goes on into one of these calls."""
        before = [False] * len(self.flow.nodes)
        for index in reversed(range(len(before))):
            for source in self.flow.sources[index]:
                before[source] = before[source] or before[index] or index in ends
        return before

    def _is_gated(self, index: int) -> bool:
        gate = self.flow.nodes[index].kind == "mul" and index not in self.meant.products
        return gate and self._joins(index)

    def _joins(self, index: int) -> bool:
        """Whether a call has more than one value that is not what the model is called with."""
        return sum(not self.flow.data[i] for i in self.flow.sources[index]) > 1

    def _is_term(self, index: int) -> bool:
        """Whether a call is one of a loss that is written out, if those after it are known."""
        node, readers = self.flow.nodes[index], self.flow.readers[index]
        if node.kind not in _TERMS or self.mixes[index] or self.flow.data[index]:
            return False
        if self.flow.is_product(index) or not (readers or node.shape == ()):
            return False
        dot = (
            node.kind == "sum"
            and node.shape
            and any(map(self._is_product, self.flow.sources[index]))
        )
        return self.terms.issuperset(readers) and not dot

    def _is_product(self, index: int) -> bool:
        """Whether a call multiplies values that come from different products."""
        if self.flow.nodes[index].kind != "mul" or not self._joins(index):
            return False
        first, *others = (self._origins(s) for s in self.flow.sources[index])
        return any(first.isdisjoint(other) for other in others)

    def _origins(self, index: int) -> set[int]:
        """The last products that a value comes from."""
        flow = self.flow
        above = reached([index], lambda i: () if flow.is_product(i) else flow.sources[i])
        return {i for i in above if flow.is_product(i)}

    def decide(self, index: int, bridge: bool, shares: list[Scaling]) -> Decision | None:
        """The decision of the plan for a result that keeps its values; None for any other call.

        bridge: whether its gradient may have a factor. shares: factors for parameters.
        """
        node = self.flow.nodes[index]
        term, op = index in self.terms, find_op(node.function) if node.function else None
        if node.shape == () or node.kind in MOVES or not (term or self.is_ranged((index,))):
            return None
        backward = 1.0
        if op is not None and bridge and not self._joins(index) and not self.is_logged(index):
            factors = op.scales(node.args, node.kwargs, func=node.function, constraint=None)
            backward = factors.get("input", 1.0)
        step = with_slots(Step(output=(1.0, backward)), shares)
        return step, "scaled", TERM if term else KEEPS

    def __contains__(self, index: int) -> bool:
        inner = self._goes_on[index] or self._gated[index] or self.flow.data[index]
        return self.whole and not inner

    def is_ranged(self, calls: tuple[int, ...]) -> bool:
        """Whether calls are a function with a range and linear ones: ``(tanh(x) + 1) / 2``."""
        kinds = {self.flow.nodes[call].kind for call in calls} - LINEAR
        chain = all(len(self.flow.sources[call]) == 1 for call in calls)
        if calls[-1] in self.terms or calls[-1] in self.meant.directions:
            return True
        if not (chain and bool(kinds) and kinds <= RANGED):
            return False
        return calls[-1] in self or (self.whole and self.is_logged(calls[-1]))

    def is_logged(self, index: int) -> bool:
        """Whether a logarithm is taken of a value, or of what is computed from each element of it:
        ``log(1 - tanh(x)**2)`` has no value for a larger one. An autograd function may take one.
        """
        nodes, readers = self.flow.nodes, self.flow.readers
        kinds = TRANSPARENT | ELEMENTWISE
        below = reached([index], lambda i: [r for r in readers[i] if nodes[r].kind in kinds])
        after = [nodes[r] for i in below for r in readers[i]]
        closed = any(node.inside not in ("", DISTRIBUTION) for node in after)
        return closed or any(node.name.rstrip("_") in _LOGARITHMS for node in after)
