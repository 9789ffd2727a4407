"""Calls whose values a plan may scale, and those that keep their values.

A call is *interior* if its value depends on parameters and feeds a layer, that is a product with a
weight. Everything else keeps its values: the inputs of the model and what is computed from them,
its results, its losses and all operations after its last layer. A submodule, or a model without
layers, is assumed to have layers around it: all of it is interior.

Some calls keep their values because of what reads them: `distances`, `cosines`, and what is
`limited` to an interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..capture.dataflow import Flow
from ..capture.kinds import ELEMENTWISE, EMBEDDINGS, LIMITED, MOVES, TRANSPARENT
from ..capture.record import CallNode

_PRODUCTS = frozenset("linear matmul mm bmm mv einsum tensordot mul".split())
_NORMS = frozenset(["norm", "vector_norm"])
_KEEPS = MOVES | {"detach"}
_BOUNDED = MOVES | {"clamp", "clamp_min", "maximum", "add"}


class Interior:
    """The interior calls of a flow. whole: whether the flow is of a whole model."""

    def __init__(self, flow: Flow, whole: bool) -> None:
        nodes = flow.nodes
        reads = [any(nodes[i.node].computed for i in node.inputs) for node in nodes]
        layers = {
            index
            for index, node in enumerate(nodes)
            if flow.is_layer(index) or (reads[index] and node.kind in EMBEDDINGS)
        }
        #: For each node, whether parameters have gone into its value.
        self.learned: list[bool] = []
        for index, sources in enumerate(flow.sources):
            self.learned.append(reads[index] or any(self.learned[source] for source in sources))
        #: For each node, whether its result feeds a layer.
        self.feeds_layers = flow.before(layers)
        part = not (whole and layers)
        between = zip(self.learned, self.feeds_layers, strict=True)
        self.calls = {i for i, ends in enumerate(between) if part or all(ends)}

    def __contains__(self, index: int) -> bool:
        return index in self.calls


def consumers(nodes: Sequence[CallNode]) -> list[dict[int, str]]:
    """For each node, the calls that read it, as an index too, and their kinds."""
    readers: list[dict[int, str]] = [{} for _ in nodes]
    for index, node in enumerate(nodes):
        for i in node.inputs:
            readers[i.node][index] = node.kind
    return readers


def distances(readers: Sequence[Mapping[int, str]]) -> set[int]:
    """The calls whose results are used only by an argmin: ``a**2 + b**2 - 2 * a @ b.T`` would sum
    scaled and unscaled terms. readers: as returned by `consumers`."""
    found: set[int] = set()
    for index in reversed(range(len(readers))):
        kinds = {kind for reader, kind in readers[index].items() if reader not in found}
        if readers[index] and kinds <= {"argmin"}:
            found.add(index)
    return found


def limited(flow: Flow, interior: Interior) -> set[int]:
    """The calls that a function defined on an interval alone reads outside the interior, perhaps
    through elementwise calls."""
    found: set[int] = set()
    for index in reversed(range(len(flow.nodes))):
        for reader in flow.readers[index]:
            kind = flow.nodes[reader].kind
            passes = kind in ELEMENTWISE | TRANSPARENT and reader in found
            if reader not in interior and (kind in LIMITED or passes):
                found.add(index)
    return found


def cosines(flow: Flow, interior: Interior) -> set[int]:
    """The calls that compute directions (values divided by their norms), and their products, after
    the last layer. These are at most 1 by design: a margin is added to the angle, or a temperature
    makes it a logit. In attention it is a logit like any other."""
    made: list[set[int]] = []  # for each node, the calls that compute its directions
    found: set[int] = set()
    for index, node in enumerate(flow.nodes):
        made.append(_directions(flow, made, node))
        if not interior.feeds_layers[index] and _is_cosine(flow, made, node):
            found |= {index}.union(*(made[i.node] for i in node.inputs))
    return found


def _directions(flow: Flow, made: list[set[int]], node: CallNode) -> set[int]:
    here, found = len(made), [made[i.node] for i in node.inputs]
    if node.kind == "normalize" or _is_over_norm(flow, node):
        return {here}
    if node.kind in ("mul", "div"):
        large = [m for m, i in zip(found, node.inputs, strict=True) if i.numel > 1]
        return {here}.union(*large) if len(large) == 1 and large[0] else set()
    found = found if node.kind == "cat" else found[:1]
    return set[int]().union(*found) if node.kind in _KEEPS and all(found) else set()


def _is_over_norm(flow: Flow, node: CallNode) -> bool:
    """Whether a call divides a value by its norm."""
    if node.kind != "div" or len(node.inputs) != 2:
        return False
    value, at = (i.node for i in node.inputs)
    while flow.nodes[at].kind in _BOUNDED and flow.nodes[at].inputs:
        at = flow.nodes[at].inputs[0].node
    norm = flow.nodes[at]
    return norm.kind in _NORMS and bool(norm.shape) and norm.inputs[0].node == value


def _is_cosine(flow: Flow, made: list[set[int]], node: CallNode) -> bool:
    """Whether a call multiplies two directions, or a direction by a constant."""
    if node.kind not in _PRODUCTS or len(node.inputs) != 2:
        return False
    directions = [bool(made[i.node]) for i in node.inputs]
    constant = [not flow.nodes[i.node].live and i.numel > 1 for i in node.inputs]
    either = all(m or c for m, c in zip(directions, constant, strict=True))
    return all(directions) or (any(directions) and either and node.kind != "mul")
