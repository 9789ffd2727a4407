"""Cosines after the last layer: they keep their values.

A direction is a value divided by its norm. The product of two directions, or of a direction and a
constant, is at most 1 by design: a margin is added to its angle, or a temperature turns it into a
logit. If the product feeds no layer, the directions and the product keep their values. In attention
it is a logit like any other. Directions read by an autograd function keep their values as well,
because its calls are left alone.
"""

from __future__ import annotations

from ..capture.dataflow import Flow
from ..capture.kinds import CASTS, MOVES
from ..capture.record import DISTRIBUTION, CallNode
from .interior import Interior

__all__ = ["cosine_calls"]

_PRODUCTS = frozenset("linear matmul mm bmm mv einsum tensordot mul".split())
_NORMS = frozenset(["norm", "vector_norm"])
_KEEPS = MOVES | CASTS | {"detach"}
_BOUNDED = MOVES | CASTS | frozenset("clamp clamp_min maximum add".split())


def cosine_calls(flow: Flow, interior: Interior) -> set[int]:
    """The calls that compute the directions of such cosines, and their products."""
    made: list[set[int]] = []  # for each node, the calls that compute its directions
    found: set[int] = set()
    for index, node in enumerate(flow.nodes):
        made.append(_directions(flow, made, node))
        if not interior.feeds_layers[index] and _is_cosine(flow, made, node):
            found |= {index}.union(*(made[i.node] for i in node.inputs))
        elif node.inside and node.inside != DISTRIBUTION:
            found = found.union(*(made[i.node] for i in node.inputs))
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
