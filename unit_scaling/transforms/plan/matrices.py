"""Matrix formulas: powers of a matrix, sums with an identity, inverses, distances.

An inverse by Newton's iteration, ``v = v @ (2 * eye - k @ v)``, is a polynomial of one matrix and
only holds for unscaled values. With a factor at each product it would converge to another matrix or
diverge. Such calls are found by data flow, starting from

1. sums of an identity and a value: ``eye - k`` and products with it;
2. sums of a *power* (a product of values with the same origin and no weight in between) and a
   constant or that value: ``3 * x - x @ x.T @ x``;
3. sums of a product and squares of its operands: ``x**2 + y**2 - 2 * x @ y``;
4. functions of linear algebra, Fourier transforms and `torch.cdist`.

They keep their values, as does everything they are computed from since the last layer or softmax,
and everything computed from them up to the next. A result that feeds the rest of the model has a
measured factor (`measure.measuring`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..capture.dataflow import Flow, reached
from ..capture.kinds import (
    ALGEBRA,
    ATTENTION,
    CASTS,
    ELEMENTWISE,
    MOVES,
    PARTS,
    RECURRENT,
    SELECTIONS,
)
from ..capture.record import Input, has_values, tensors_in
from .actions import Kept

__all__ = ["Matrices"]

KEEPS = "in a formula of matrices: keeps its values"
"""The reason shown in the report."""

_ADDS = frozenset(["add", "sub", "rsub"])
_SQUARES = frozenset("pow square norm vector_norm".split())
_ENDS = frozenset("softmax log_softmax sigmoid tanh normalize".split())
"""Calls whose output scale does not depend on their input."""
_FEATURES = frozenset(
    "relu relu6 leaky_relu rrelu elu selu celu gelu silu mish hardswish softplus hardtanh".split()
)
_SPELLED = ((ELEMENTWISE | MOVES) - _FEATURES - _ENDS) | frozenset(
    "sum mean norm vector_norm var std amax amin max min maximum minimum logsumexp".split()
)
"""Kinds that may be part of a formula, besides products."""
_CHAINED = MOVES | CASTS | frozenset(["mul", "div", "neg"])

_Root = tuple[int, int]
"""(node, index of its result)."""


class Matrices:
    """The calls of all matrix formulas."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._roots: list[frozenset[_Root]] = []
        for index in range(len(flow.nodes)):
            self._roots.append(self._found(index))
        self._mixing = flow.before({i for i in range(len(flow.nodes)) if flow.is_product(i)})
        self._powers = {i for i in range(len(flow.nodes)) if self._is_power(i)}
        self.calls = self._closed(self._seeds())

    def kept(self) -> dict[int, Kept]:
        """What the plan does with these calls."""
        found = {}
        for index in self.calls:
            named = self.flow.is_product(index) or self.flow.nodes[index].kind in ALGEBRA
            found[index] = Kept("unchanged" if named else "", KEEPS)
            if self._is_result(index):
                found[index] = Kept("scaled", "the result of a formula of matrices")
        return found

    def _is_result(self, index: int) -> bool:
        """Whether a call of a formula feeds products, and no other call of the formula reads it."""
        readers = self.flow.readers[index]
        ends = all(self.flow.nodes[reader].kind in _ENDS for reader in readers)
        return self._mixing[index] and self.calls.isdisjoint(readers) and not ends

    # Origins of values

    def _found(self, index: int) -> frozenset[_Root]:
        """The values that a call is computed from, back to the last layer, softmax or slice."""
        node, sources = self.flow.nodes[index], self.flow.sources[index]
        whole = node.kind not in SELECTIONS or node.numel == node.inputs[0].numel
        if not sources or not whole or node.kind in _ENDS or self._is_layer(index):
            return frozenset([(index, 0)])
        return frozenset[_Root]().union(*(self._from(i) for i in self._values(index)))

    def _from(self, i: Input) -> frozenset[_Root]:
        if self.flow.nodes[i.node].kind in PARTS:
            return frozenset([(i.node, i.part)])
        return self._roots[i.node]

    def _values(self, index: int) -> list[Input]:
        return [i for i in self.flow.nodes[index].inputs if i.node in self.flow.sources[index]]

    def _is_layer(self, index: int) -> bool:
        """Whether a call multiplies values by weights, or is attention or a recurrent layer."""
        kind = self.flow.nodes[index].kind
        return self.flow.is_layer(index) or kind in RECURRENT | ATTENTION

    def _is_power(self, index: int) -> bool:
        """Whether a call multiplies values with the same origin."""
        values = self._values(index)
        if not self.flow.is_product(index) or self._is_layer(index) or len(values) < 2:
            return False
        first, *others = (self._from(i) for i in values[-2:])
        return any(first & other for other in others)

    # Seeds of a formula

    def _seeds(self) -> set[int]:
        found = set[int]()
        for index, node in enumerate(self.flow.nodes):
            if node.inside or not self.flow.sources[index]:
                continue
            if node.kind in ALGEBRA:
                found.add(index)
            elif node.kind in _ADDS and len(node.inputs) == 2:
                found |= self._summed(index)
        return found

    def _summed(self, index: int) -> set[int]:
        """A sum and the product in it, if they seed a formula."""
        nodes, inputs = self.flow.nodes, self.flow.nodes[index].inputs
        given = dict(tensors_in(nodes[index].args))
        for term, other in (inputs, inputs[::-1]):
            at = self._product(term.node)
            constant = not nodes[other.node].live and nodes[other.node].floating
            if constant and nodes[term.node].live and _is_identity(given.get(other.slot)):
                return {index}
            if at is None:
                continue
            power = at in self._powers
            if power and constant and other.numel > 1 and not nodes[other.node].masking:
                return {index, at}
            terms = frozenset[_Root]().union(*(self._from(i) for i in self._values(at)))
            if terms & self._from(other) and (power or self._squares(other.node)):
                return {index, at}
        return set()

    def _product(self, index: int) -> int | None:
        """The product that a value comes from through moves and multiplications by numbers."""
        at = self._base(index)
        return at if self.flow.is_product(at) else None

    def _base(self, index: int) -> int:
        while (above := self.flow.up(index, _CHAINED)) is not None:
            index = above
        return index

    def _squares(self, index: int) -> bool:
        """Whether a value is a sum of squares only."""
        above = reached([index], lambda i: self.flow.sources[i] if self._is_spelled(i) else ())
        kinds = {self.flow.nodes[i].kind for i in above if self._is_spelled(i)}
        return bool(kinds & _SQUARES) and bool(kinds & {"sum", "norm", "vector_norm"})

    # Closure of a formula

    def _is_spelled(self, index: int) -> bool:
        node = self.flow.nodes[index]
        return node.kind in _SPELLED and not node.inside and bool(self.flow.sources[index])

    def _closed(self, seeds: set[int]) -> set[int]:
        flow, places = self.flow, dict[object, list[int]]()
        if not seeds:
            return set()
        for index in range(len(flow.nodes)):
            if flow.is_product(index) or flow.nodes[index].kind in _ADDS:
                places.setdefault(flow.nodes[index].place, []).append(index)
        found: set[int] = set()
        todo = seeds
        while todo:
            found |= todo
            found = reached(found, lambda i: filter(self._is_above, flow.sources[i]))
            again = {j for i in found for j in places.get(flow.nodes[i].place, ())}
            below = {j for i in found for j in flow.readers[i] if self._is_below(i, j, found)}
            todo = (again | below) - found
        return {i for i in found if flow.nodes[i].function is not None}

    def _is_above(self, index: int) -> bool:
        """Whether a formula extends above one of its calls."""
        node = self.flow.nodes[index]
        if index in self._powers or node.kind in _ENDS:
            return True
        if not self._is_spelled(index):
            return False
        first, *others = (self._from(i) for i in self._values(index))
        if node.kind not in _ADDS or any(first & other for other in others):
            return True
        return all(self._is_spelled(self._base(i.node)) for i in self._values(index))

    def _is_below(self, index: int, reader: int, found: set[int]) -> bool:
        """Whether a formula extends to a call that reads one of its calls."""
        node = self.flow.nodes[reader]
        if self.flow.is_product(reader):
            identity = self._identity(index)
            return reader in self._powers or (identity and not self._is_layer(reader))
        known = self._is_spelled(reader) or node.kind in ALGEBRA
        return known and found.issuperset(self.flow.sources[reader])

    def _identity(self, index: int) -> bool:
        """Whether a value is a sum with an identity, up to moves and multiplications by numbers."""
        add = self.flow.nodes[self._base(index)]
        return add.kind in _ADDS and any(_is_identity(t) for _, t in tensors_in(add.args))


@torch.no_grad()
def _is_identity(tensor: Tensor | None) -> bool:
    """Whether a tensor is a multiple of an identity, or a batch of these."""
    if tensor is None or tensor.dim() < 2 or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    *_, rows, columns = tensor.shape
    if rows != columns or rows < 2 or not tensor.numel() or not has_values([tensor]):
        return False
    first = tensor.reshape(-1, rows, columns)[0, 0, 0]
    eye = first * torch.eye(rows, dtype=tensor.dtype, device=tensor.device)
    return bool(first != 0) and bool((tensor == eye).all())
