"""Values after the last product that are in units: cosines, and what is added to an input.

A direction is a value over its norm. The product of two, or of one and a constant, is at most 1,
and is meant to be: a margin is added to its angle, a temperature makes a logit of it. So where it
goes on into no product, the directions, it and all that follows keep their values; gradients alone
are scaled. In attention it is a logit like any other.

What is added to an input there has the units of the input: a forecast and the mean that was taken
off, a value and a reward, noise and what it is taken from.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..ops import find_op
from .calls import CASTS, LOSSES, MOVES
from .flow import Flow, reached
from .record import Node
from .steps import Decision, Scaling, Step, with_slots

__all__ = ["Meant"]

COSINE = "of a cosine, after the last product: keeps its values"
MET = "with what the model is called with, after the last product: keeps its values"
"""What the report says."""

_PRODUCTS = frozenset("linear matmul mm bmm mv einsum tensordot mul".split())
_NORMS = frozenset(["norm", "vector_norm"])
_KEEPS = MOVES | CASTS | {"detach"}
_AFFINE = MOVES | CASTS | frozenset("mul div neg".split())
_BOUNDED = MOVES | CASTS | frozenset("clamp clamp_min maximum add".split())


class Meant:
    """directions: the calls that make one that goes into a cosine. products: the cosines. met: what
    is added to an input. calls: all of these, and all that is made of them, as far as it is no loss
    of torch. adds, mixes, whole: as in `Results`.
    """

    def __init__(self, flow: Flow, adds: Collection[int], mixes: list[bool], whole: bool) -> None:
        self.flow = flow
        self._made: list[set[int]] = []  # of each node, the calls that make the directions in it
        for node in flow.nodes:
            self._made.append(self._directions(node))
        self.directions: set[int] = set()
        self.products: set[int] = set()
        self.calls: set[int] = set()
        self.met: set[int] = set()
        for index, node in enumerate(flow.nodes):
            if self.calls.intersection(flow.sources[index]):
                if node.kind not in LOSSES and node.shape:
                    self.calls.add(index)
            elif whole and not mixes[index] and self._is_cosine(node):
                self.directions |= {i for source in node.inputs for i in self._made[source.node]}
                self.products.add(index)
                self.calls |= {index, *(i for i in self.directions if flow.nodes[i].kind == "mul")}
        self._meet_data([mixes[i] or i in adds or not whole for i in range(len(mixes))])

    def _meet_data(self, mixes: list[bool]) -> None:
        """Adds what is added to an input after the last product, from the product on."""
        flow, starts = self.flow, list[int]()
        for index, node in enumerate(flow.nodes):
            made = [flow.data[source] for source in flow.sources[index]]
            if self.met.intersection(flow.sources[index]):
                self.met |= {index} if node.kind not in LOSSES and node.shape else set()
            elif node.kind in ("add", "sub") and not mixes[index] and len({*made}) == 2:
                self.met.add(index)
                starts.append(index)

        def above(index: int) -> list[int]:
            made = [i for i in flow.sources[index] if not flow.data[i] and i not in self.met]
            return [i for i in made if flow.nodes[i].kind in _AFFINE]

        self.met |= reached(starts, above)
        self.calls |= self.met

    def _directions(self, node: Node) -> set[int]:
        here, found = len(self._made), [self._made[i.node] for i in node.inputs]
        if node.kind == "normalize" or self._is_over_norm(node):
            return {here}
        if node.kind in ("mul", "div"):
            large = [made for made, i in zip(found, node.inputs, strict=True) if i.numel > 1]
            return {here}.union(*large) if len(large) == 1 and large[0] else set()
        found = found if node.kind == "cat" else found[:1]
        return set[int]().union(*found) if node.kind in _KEEPS and all(found) else set()

    def _is_over_norm(self, node: Node) -> bool:
        """Whether a call divides a value by its norm."""
        if node.kind != "div" or len(node.inputs) != 2:
            return False
        value, at = (i.node for i in node.inputs)
        nodes = self.flow.nodes
        while nodes[at].kind in _BOUNDED and nodes[at].inputs:
            at = nodes[at].inputs[0].node
        norm = nodes[at]
        return norm.kind in _NORMS and bool(norm.shape) and norm.inputs[0].node == value

    def _is_cosine(self, node: Node) -> bool:
        """Whether a call multiplies directions, or one by a constant."""
        if node.kind not in _PRODUCTS or len(node.inputs) != 2:
            return False
        made = [bool(self._made[i.node]) for i in node.inputs]
        constant = [not self.flow.nodes[i.node].live and i.numel > 1 for i in node.inputs]
        either = all(m or c for m, c in zip(made, constant, strict=True))
        return all(made) or (any(made) and either and node.kind != "mul")

    def decide(self, index: int, bridge: bool, shares: list[Scaling]) -> Decision:
        """As a decision of the plan. bridge, shares: as in `Results.decide`."""
        node = self.flow.nodes[index]
        step, op = with_slots(None, shares), find_op(node.function) if node.function else None
        if index in self.products and node.kind != "mul" and bridge and op is not None:
            settings = {"func": node.function, "constraint": None}
            factor = op.scales(node.args, node.kwargs, **settings)["output"]
            step = replace(step or Step(), op=op.name, constraint=None, output=(1 / factor, 1.0))
        elif node.kind in ("mul", "div") and bridge:
            nodes = self.flow.nodes
            numbers = [abs(n) for n in node.args if isinstance(n, int | float) and n]
            numbers += [nodes[i.node].rms for i in node.inputs if nodes[i.node].computed]
            sizes = [n if node.kind == "div" else 1 / n for n in numbers]
            step = replace(step or Step(), output=(1.0, sizes[0])) if sizes else step
        why = MET if index in self.met else COSINE
        return step, "scaled" if step else "unchanged", why
