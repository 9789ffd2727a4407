"""Which parameters hold the scale of a result, so that multiplying them by a number multiplies the
result by it and changes nothing else.

A search walks back from the result through calls that are in proportion to one of their
arguments: moves, sums, products, gains. It ends at weights of products, tables and gains. Where a
value is read by a call beside the one that asks, its scale is not free, unless that call is a norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..record.calls import CallNode, Input
from ..record.flow import Flow
from ..record.kinds import (
    ATTENTION,
    EMBEDDINGS,
    NORMS,
    PRODUCTS,
    TRANSPARENT,
    named,
)
from ..record.values import has_scale

PROPORTIONAL = TRANSPARENT | named(
    "mean avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d relu leaky_relu abs neg sum std norm amax amin cumsum sort topk gather "
    "fold interpolate tril triu dropout1d dropout2d dropout3d max_pool1d max_pool2d max_pool3d"
)
"""Kinds whose result is in proportion to their first argument."""

SUMS = named(
    "add sub rsub cat concat concatenate stack where setitem index_put index_add scatter "
    "scatter_add masked_fill"
)
"""Kinds whose result is in proportion to all arguments together."""


@dataclass(frozen=True)
class Holder:
    """A parameter that holds the scale of a result. shift: what the model adds to it before it
    multiplies values, as Gemma's gains 1 + w."""

    parameter: str
    shift: float = 0.0


@dataclass(frozen=True)
class Sources:
    """The search in a recording. weights: the index of a product -> the argument that is its
    weight. fixed: names of tables that are weights of products too."""

    flow: Flow
    weights: dict[int, Input]
    fixed: Collection[str]

    def holders(
        self,
        index: int,
        reader: int,
    ) -> list[Holder] | None:
        """What holds the scale of the result of call ``index``, as ``reader`` reads it. None: no
        parameter, or it is read by others too."""
        visited: set[int] = set()
        found = self._back(index, visited)
        if found and not self._is_shared(visited, reader):
            return found
        return None

    def _is_shared(self, visited: Collection[int], reader: int) -> bool:
        readers = (r for index in visited for r in self.flow.readers[index])
        return any(
            r not in visited and r != reader and not self._is_absorbed(r)
            for r in readers
        )

    def _is_absorbed(self, index: int) -> bool:
        """Whether the result of a call does not depend on the scale of what it reads."""
        kind = self.flow.nodes[index].kind
        if kind in NORMS:
            return True
        readers = self.flow.readers[index]
        return (
            kind in PROPORTIONAL
            and bool(readers)
            and all(map(self._is_absorbed, readers))
        )

    def _back(
        self,
        index: int,
        visited: set[int],
    ) -> list[Holder] | None:
        node = self.flow.nodes[index]
        if node.function is None:
            if node.parameter:
                return [Holder(node.parameter)]
            return None
        if index in visited:
            return []
        visited.add(index)
        if index in self.weights:
            return self._of_product(index)
        kind = node.kind
        numbers = {slot for slot, t in node.tensors.items() if has_scale(t)}
        terms = [i for i in node.inputs if i.slot in numbers]
        if isinstance(node.function, type) and kind:  # a move between processes
            terms = node.inputs
        if node.inside or not terms:
            return None
        if kind in EMBEDDINGS:
            name = self.flow.origin(terms[0])
            if name and name not in self.fixed:
                return [Holder(name)]
            return None
        if kind == "add" and len(terms) == 1:
            return self._shifted(node, terms[0])
        if kind in SUMS:
            return self._of_all(terms, visited)
        if kind in PROPORTIONAL or kind == "div":
            return self._back(terms[0].node, visited)
        if kind in ATTENTION:
            return self._back(terms[2].node, visited)
        if kind in NORMS:
            gains = [self.flow.nodes[i.node].parameter for i in terms]
            return [Holder(name) for name in gains if name] or None
        if kind == "mul" or kind in PRODUCTS:
            return self._of_one(index, terms, visited)
        return None

    def _of_product(self, index: int) -> list[Holder] | None:
        """Returns the holders of a product: its weight and its bias."""
        name = self.flow.origin(self.weights[index])
        if name is None or name in self.fixed:
            return None
        node = self.flow.nodes[index]
        biases = map(self.flow.origin, node.added)
        return [Holder(name), *(Holder(bias) for bias in biases if bias)]

    def _shifted(
        self,
        node: CallNode,
        term: Input,
    ) -> list[Holder] | None:
        """Returns the holder of the sum of a parameter and a number."""
        name = self.flow.origin(term)
        if name is None:
            return None
        given = (*node.args, *node.kwargs.values())
        numbers = [value for value in given if isinstance(value, int | float)]
        return [Holder(name, float(sum(numbers)))]

    def _of_all(
        self,
        terms: Iterable[Input],
        visited: set[int],
    ) -> list[Holder] | None:
        found: list[Holder] = []
        for term in terms:
            own = self._back(term.node, visited)
            if own is None:
                return None
            found += [holder for holder in own if holder not in found]
        return found

    def _of_one(
        self, index: int, terms: list[Input], visited: set[int]
    ) -> list[Holder] | None:
        """Returns the holders of one factor of a product: the factor that nothing else reads, and
        a computed one rather than a gain."""
        factors = [i for i in terms if i not in self.flow.nodes[index].added]
        if len({i.node for i in factors}) < len(factors):
            return None  # a square
        ranked = []
        for i in reversed(factors):
            own = set(visited)
            found = self._back(i.node, own)
            if found:
                is_shared = self._is_shared(own - visited, index)
                ranked.append((is_shared, self.flow.origin(i) is not None, found, own))
        if not ranked:
            return None
        *_, holders, own = min(ranked, key=lambda each: each[:2])
        visited |= own
        return holders
