"""Matrix formulas: powers of a matrix, sums with an identity, inverses, distances.

Newton's iteration for an inverse, ``v = v @ (2 * eye - k @ v)``, holds for unscaled values: with a
factor at each product it would converge to another matrix or diverge. Formulas start from

1. sums of an identity and a value: ``eye - k`` and products with it;
2. sums of a *power* (a product of values with the same origin and no weight in between) and that
   value: ``3 * x - x @ x.T @ x``;
3. sums of a product and squares of its operands: ``x**2 + y**2 - 2 * x @ y``;
4. functions of linear algebra, Fourier transforms and `torch.cdist`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..capture.dataflow import Flow, reached
from ..capture.kinds import ALGEBRA, ATTENTION, FORMED, MOVES, PARTS, RECURRENT, SELECTIONS
from ..capture.record import Input, tensors_in
from ..capture.values import has_values, is_strided

ADDS = frozenset(["add", "sub", "rsub"])
ENDS = frozenset("softmax log_softmax sigmoid tanh normalize".split())
"""Calls whose output scale does not depend on their input."""

_SQUARES = frozenset("pow square norm vector_norm".split())
_SUMS = frozenset("sum norm vector_norm".split())
_CHAINED = MOVES | {"mul", "div", "neg"}

_Root = tuple[int, int]
"""(node, index of its result)."""


class Matrices:
    """Queries on the origins of values. powers: the products of values with the same origin."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._roots: list[frozenset[_Root]] = []
        for index in range(len(flow.nodes)):
            self._roots.append(self._found(index))
        self.powers = {i for i in range(len(flow.nodes)) if self._is_power(i)}

    def origins(self, index: int) -> list[frozenset[_Root]]:
        """Those of the arguments of a call: what they are computed from, back to the last layer,
        softmax or slice."""
        return [self._from(i) for i in self.flow.values(index)]

    def _found(self, index: int) -> frozenset[_Root]:
        node, sources = self.flow.nodes[index], self.flow.sources[index]
        whole = node.kind not in SELECTIONS or node.numel == node.inputs[0].numel
        if not sources or not whole or node.kind in ENDS or self._is_layer(index):
            return frozenset([(index, 0)])
        return frozenset[_Root]().union(*self.origins(index))

    def _from(self, i: Input) -> frozenset[_Root]:
        if self.flow.nodes[i.node].kind in PARTS:
            return frozenset([(i.node, i.part)])
        return self._roots[i.node]

    def _is_layer(self, index: int) -> bool:
        """Whether a call multiplies values by weights, or is attention or a recurrent layer."""
        kind = self.flow.nodes[index].kind
        return self.flow.is_layer(index) or kind in RECURRENT | ATTENTION

    def _is_power(self, index: int) -> bool:
        if not self.flow.is_product(index) or self._is_layer(index):
            return False
        first, *others = self.origins(index)[-2:]
        return any(first & other for other in others)

    def base(self, index: int) -> int:
        """The call that a value comes from through moves and multiplications by numbers."""
        while (above := self.flow.up(index, _CHAINED)) is not None:
            index = above
        return index

    def is_formed(self, index: int) -> bool:
        """Whether a call on values may be part of a region, besides products."""
        node = self.flow.nodes[index]
        return node.kind in FORMED - ENDS and not node.inside and bool(self.flow.sources[index])

    # Seeds of a formula

    def seeds(self) -> set[int]:
        """The calls that formulas start from."""
        found = set[int]()
        for index, node in enumerate(self.flow.nodes):
            if node.inside or not self.flow.sources[index]:
                continue
            if node.kind in ALGEBRA:
                found.add(index)
            elif node.kind in ADDS and len(node.inputs) == 2:
                found |= self._summed(index)
        return found

    def _summed(self, index: int) -> set[int]:
        """A sum and the product in it, if they seed a formula."""
        nodes, inputs = self.flow.nodes, self.flow.nodes[index].inputs
        given = dict(tensors_in(nodes[index].args))
        for term, other in (inputs, inputs[::-1]):
            at = self.base(term.node)
            constant = not nodes[other.node].live and nodes[other.node].floating
            if constant and nodes[term.node].live and _is_identity(given.get(other.slot)):
                return {index}
            if not self.flow.is_product(at):
                continue
            terms = frozenset[_Root]().union(*self.origins(at))
            known = at in self.powers or self._squares(other.node)
            if known and terms & self._from(other):
                return {index, at}
        return set()

    def _squares(self, index: int) -> bool:
        """Whether a value is a sum of squares only."""
        flow = self.flow
        above = reached([index], lambda i: flow.sources[i] if self.is_formed(i) else ())
        kinds = {flow.nodes[i].kind for i in above if self.is_formed(i)}
        return bool(kinds & _SQUARES) and bool(kinds & _SUMS)


@torch.no_grad()
def _is_identity(tensor: Tensor | None) -> bool:
    """Whether a tensor is a multiple of an identity, or a batch of these."""
    if tensor is None or tensor.dim() < 2 or tensor.is_meta or not is_strided(tensor):
        return False
    *_, rows, columns = tensor.shape
    if rows != columns or rows < 2 or not tensor.numel() or not has_values([tensor]):
        return False
    first = tensor.flatten()[0]
    eye = first * torch.eye(rows, dtype=tensor.dtype, device=tensor.device)
    return bool(first != 0) and bool((tensor == eye).all())
