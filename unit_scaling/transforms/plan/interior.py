"""Calls whose values a plan may scale, and those that keep their values.

A call is *interior* if its value depends on parameters and feeds a layer, that is a product with a
weight. Everything else keeps its values: the inputs of the model and what is computed from them,
its results, its losses and all operations after its last layer. A submodule, or a model without
layers, is assumed to have layers around it: all of it is interior.

Some calls keep their values because of what reads them: `distances`, `cosines`, and what is
`limited` to an interval.
"""

from __future__ import annotations

from ..capture.dataflow import Flow, reached
from ..capture.kinds import ELEMENTWISE, EMBEDDINGS, LIMITED, MOVES, TRANSPARENT
from ..capture.record import CallNode

_PRODUCTS = frozenset("linear matmul mm bmm mv einsum tensordot mul".split())
_NORMS = frozenset(["norm", "vector_norm"])
_KEEPS = MOVES | {"detach"}
_BOUNDED = MOVES | {"clamp", "clamp_min", "maximum", "add"}


class Interior:
    """The interior calls of a flow. whole: whether the flow is of a whole model."""

    def __init__(self, flow: Flow, whole: bool) -> None:
        nodes = range(len(flow.nodes))
        reads = {i for i in nodes if flow.reads_weights(i)}
        lookups = {i for i in reads if flow.nodes[i].kind in EMBEDDINGS}
        layers = lookups.union(filter(flow.is_layer, nodes))
        #: The nodes that parameters have gone into the values of, and those that feed a layer.
        self.learned = reached(reads, flow.readers.__getitem__)
        self.feeds_layers = flow.before(layers)
        self.calls = self.learned & self.feeds_layers if whole and layers else set(nodes)


def distances(flow: Flow) -> set[int]:
    """The calls whose results are used only by an argmin: ``a**2 + b**2 - 2 * a @ b.T`` would sum
    scaled and unscaled terms."""
    found: set[int] = set()
    for index, readers in reversed([*enumerate(flow.consumers)]):
        if readers and all(flow.nodes[r].kind == "argmin" for r in readers - found):
            found.add(index)
    return found


def limited(flow: Flow, interior: Interior) -> set[int]:
    """The calls that a function defined on an interval alone reads outside the interior, perhaps
    through elementwise calls."""

    def above(index: int) -> list[int]:
        passes = flow.nodes[index].kind in ELEMENTWISE | TRANSPARENT
        return flow.sources[index] if passes and index not in interior.calls else []

    ends = [
        i for i, node in enumerate(flow.nodes) if node.kind in LIMITED and i not in interior.calls
    ]
    return reached([s for end in ends for s in flow.sources[end]], above)


def cosines(flow: Flow, interior: Interior) -> set[int]:
    """The calls that compute directions (values divided by their norms), and their products, after
    the last layer. These are at most 1 by design: a margin is added to the angle, or a temperature
    makes it a logit. In attention it is a logit like any other."""
    made: list[set[int]] = []  # for each node, the calls that compute its directions
    found: set[int] = set()
    for index, node in enumerate(flow.nodes):
        made.append(_directions(flow, made, node))
        if index not in interior.feeds_layers and _is_cosine(flow, made, node):
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
