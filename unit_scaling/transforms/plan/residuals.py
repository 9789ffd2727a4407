"""Residual connections in a recorded model, and the weights of their branches.

An add is *residual* if one term is an ancestor of the other with products in between. The ancestor
is the skip connection, the other term the branch. A value that is subtracted from its own input is
not a skip connection of the remainder. Branches with the same origin are found one by one (``x +
f(x) + g(x)``) or already summed (``f(x) + g(x) + x``).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ..capture.dataflow import Flow
from ..capture.kinds import TRANSPARENT
from ..capture.record import Slot

# Default branch weights (tau in the Unit Scaling library guide). Attention branches need a much
# smaller weight than feed-forward branches for stable training.
TAU_ATTENTION, TAU_FEED_FORWARD = 0.01, 0.5

RESIDUALS = ("fixed", "umup")
"""The rules for branch weights: by type of branch, or by depth."""

Weights = tuple[tuple[Slot, float], ...]
"""(slot, factor) for terms of an add."""


@dataclass
class _Branch:
    """A residual branch: its origin, its last node, its nodes and its weight tau.

    skip, slot: the skip connection, as a node and as an argument of the add.
    """

    skip: int
    slot: Slot
    origin: int
    end: int
    end_slot: Slot
    region: list[int]
    tau: float = 1.0


@dataclass
class Residuals:
    """adds: node of a weighted add -> (its weights, text for the report). depths: parameter in a
    branch -> the depth of its stream, in layers of two branches each, as in a transformer.
    """

    adds: dict[int, tuple[Weights, str]] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)


def find_residuals(flow: Flow, rule: str, formulas: Collection[int] = ()) -> Residuals:
    """Finds the residual adds of a model. rule: one of `RESIDUALS`. formulas: excluded calls."""
    adds: dict[int, _Branch] = {}
    for index, node in enumerate(flow.nodes):
        suitable = node.kind == "add" and not node.inside and index not in formulas
        branch = _branch(flow, adds, index) if suitable else None
        if branch is not None:
            adds[index] = branch
    places = _places(flow, adds)
    found = Residuals()
    for index, branch in adds.items():
        parts = _parts(flow, adds, branch)
        for part in parts or [branch]:
            if rule == "umup":
                part.tau = _depth_rule(*places[index])
            else:
                attention = any(map(flow.is_attention, part.region))
                part.tau = TAU_ATTENTION if attention else TAU_FEED_FORWARD
        branch.tau = sum(part.tau**2 for part in parts or [branch]) ** 0.5
        norm = (1 + branch.tau**2) ** 0.5
        weights = ((branch.slot, 1 / norm), (branch.end_slot, branch.tau / norm))
        found.adds[index] = weights, f"residual add, tau {branch.tau:.3g}"
        depth = math.ceil(places[index][1] / 2)
        for part in parts or [branch]:
            for name in sorted(_weights(flow, part)):
                found.depths[name] = max(depth, found.depths.get(name, 1))
        if parts:
            inner = tuple((part.end_slot, part.tau / branch.tau) for part in parts)
            taus = " and ".join(f"{part.tau:.3g}" for part in parts)
            found.adds[branch.end] = inner, f"joins parallel branches, tau {taus}"
    return found


def _terms(flow: Flow, index: int) -> list[tuple[Slot, int]]:
    nodes = flow.nodes
    return [
        (i.slot, i.node)
        for i in nodes[index].inputs
        if nodes[i.node].live and not nodes[i.node].computed
    ]


def _branch(flow: Flow, adds: dict[int, _Branch], index: int) -> _Branch | None:
    terms = _terms(flow, index)
    if len(terms) != 2:
        return None
    for (slot, skip), (end_slot, end) in (terms, terms[::-1]):
        if flow.nodes[skip].numel != flow.nodes[index].numel:
            continue  # broadcast over positions: a shift
        origin, region = _origin(flow, adds, skip, end)
        if any(map(flow.is_product, region)) and not _is_rest(flow, origin, region):
            return _Branch(skip, slot, origin, end, end_slot, region)
    return None


def _is_rest(flow: Flow, origin: int, region: list[int]) -> bool:
    """Whether the input of a branch is a value minus the skip connection.

    In series decomposition, ``f(x - trend(x)) + trend(x)``, the trend is not a skip connection of
    the remainder.
    """
    todo = [origin]
    for index in todo:
        for reader in set(region).intersection(flow.readers[index]):
            node = flow.nodes[reader]
            if node.kind in TRANSPARENT:
                todo.append(reader)
            elif node.kind != "sub" or not flow.between(flow.sources[reader][0], origin):
                return False
    return True


def _origin(flow: Flow, adds: dict[int, _Branch], skip: int, end: int) -> tuple[int, list[int]]:
    """(origin of the branch, nodes of the branch); the origin is the nearest common ancestor."""
    at: int | None = skip
    while at is not None:
        region = flow.between(at, end)
        if region:
            return at, region
        # x + f(x) + g(x): the second branch has the origin of the first
        at = adds[at].origin if at in adds else flow.up(at, TRANSPARENT)
    return skip, []


def _parts(flow: Flow, adds: dict[int, _Branch], branch: _Branch) -> list[_Branch]:
    """The branches that a branch is the sum of; [] if it is not a sum."""
    index = branch.end
    if flow.nodes[index].kind != "add" or index in adds or len(flow.readers[index]) != 1:
        return []
    parts = []
    for slot, end in _terms(flow, index):
        region = flow.between(branch.origin, end)
        parts.append(_Branch(branch.skip, slot, branch.origin, end, slot, region))
    apart = len(parts) == 2 and all(any(map(flow.is_product, part.region)) for part in parts)
    return parts if apart else []


def _weights(flow: Flow, branch: _Branch) -> set[str]:
    """The parameters in a branch, including those of values from elsewhere that its products
    use."""
    region, todo = set(branch.region), list(branch.region)
    while todo:
        index = todo.pop()
        if index in branch.region or not flow.is_product(index):
            new = {s for s in flow.sources[index] if region.issuperset(flow.readers[s])} - region
            todo += new - {branch.origin}
            region |= new - {branch.origin}
    return {name for index in region for name in flow.weights(index)}


def _depth_rule(number: int, branches: int) -> float:
    """The weight with which the input and all branches contribute equally to the output.

    This is `uu.transformer_residual_scaling_rule` with its defaults, for any number of branches.
    Source: u-muP, arXiv 2407.17465, G.2.2.
    """
    return (branches / 2 + number) ** -0.5


def _places(flow: Flow, adds: dict[int, _Branch]) -> dict[int, tuple[int, int]]:
    """For each residual add, its index in its stream and the number of adds in the stream."""
    stream: dict[int, int] = {}
    number: dict[int, int] = {}
    count: dict[int, int] = {}
    for index, branch in adds.items():
        before: int | None = branch.skip
        while before is not None and before not in stream:
            alone = len(flow.sources[before]) == 1 and not flow.is_product(before)
            before = flow.sources[before][0] if alone else None
        stream[index] = index if before is None else stream[before]
        number[index] = 0 if before is None else number[before] + 1
        count[stream[index]] = max(count.get(stream[index], 0), number[index] + 1)
    return {index: (number[index], count[stream[index]]) for index in adds}
