"""Residual connections in a recorded model, and the weights of their branches.

An add is *residual* if one term is an ancestor of the other with products in between. The ancestor
is the skip connection, the other term the branch. Branches with the same origin are found one by
one (``x + f(x) + g(x)``) or, already summed (``f(x) + g(x) + x``), as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...core.functional import completep_residual_scaling_rule
from ..record.calls import Input
from ..record.flow import Flow
from ..record.kinds import TRANSPARENT
from .plan import Step

Decision = tuple[Step | None, str, str]
"""(step, what the report says was done or "" for no row, why)."""

RESIDUALS = ("completep", "umup", "fixed")
"""The rules for branch weights: by the number of branches, with learning rates that do not depend
on it or that do, or by the type of branch. The first is the default."""

TAU_ATTENTION, TAU_FEED_FORWARD = 0.01, 0.5
"""The branch weights of "fixed": those of the guide of the Unit Scaling library."""


@dataclass
class _Branch:
    """A residual branch: its origin and its nodes. skip, end: the arguments of the add, the skip
    connection and the last node."""

    skip: Input
    end: Input
    origin: int
    region: list[int]


@dataclass
class Residuals:
    """adds: node of a weighted add -> the weights of its terms. depths: under the rule "umup",
    parameter in a branch -> the depth of its stream, in layers of two branches each."""

    adds: dict[int, Decision] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)


def find_residuals(flow: Flow, rule: str) -> Residuals:
    """Finds the residual adds of a model. rule: one of `RESIDUALS`."""
    adds: dict[int, _Branch] = {}
    for index, node in enumerate(flow.nodes):
        suitable = node.kind == "add" and not node.inside
        if suitable and (branch := _branch(flow, adds, index)) is not None:
            adds[index] = branch
    places = _places(flow, adds)
    residuals = Residuals()
    for index, branch in adds.items():
        number, count = places[index]
        joined = flow.nodes[branch.end.node].kind == "add"  # of attention and another branch
        attention = not joined and any(map(flow.is_attention, branch.region))
        tau = _tau(rule, number, count, attention)
        for name in {n for i in branch.region for n in flow.weights(i)} if rule == "umup" else ():
            residuals.depths[name] = max(math.ceil(count / 2), residuals.depths.get(name, 1))
        norm = (1 + tau**2) ** 0.5
        weights = {branch.skip.slot: 1 / norm, branch.end.slot: tau / norm}
        node = flow.nodes[index]
        terms = tuple(weights[i.slot] for i in node.inputs if i.slot in weights)
        step = Step(terms=terms, writes=(0,) in node.written)
        residuals.adds[index] = step, "scaled", f"residual add, tau {tau:.3g}"
    return residuals


def _tau(rule: str, number: int, count: int, attention: bool) -> float:
    """The weight of branch ``number`` of the ``count`` branches of a stream, relative to what the
    stream has become by then."""
    if rule == "fixed":
        return TAU_ATTENTION if attention else TAU_FEED_FORWARD
    if rule == "umup":
        # The input and all branches contribute equally to the output, as by
        # `uu.transformer_residual_scaling_rule`. Source: u-muP, arXiv 2407.17465, G.2.2.
        return (count / 2 + number) ** -0.5
    return completep_residual_scaling_rule()(number, count)


def _branch(flow: Flow, adds: dict[int, _Branch], index: int) -> _Branch | None:
    terms = flow.values(index)
    if len(terms) != 2:
        return None
    for skip, end in (terms, terms[::-1]):
        if flow.nodes[skip.node].value.numel != flow.nodes[index].value.numel:
            continue  # broadcast over positions: a shift
        origin, region = _origin(flow, adds, skip.node, end.node)
        if any(map(flow.is_product, region)):
            return _Branch(skip, end, origin, region)
    return None


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


def _places(flow: Flow, adds: dict[int, _Branch]) -> dict[int, tuple[int, int]]:
    """For each residual add, its index in its stream and the number of adds in the stream."""
    found: dict[int, tuple[int, int]] = {}  # (the first add of the stream, index in it)
    for index, branch in adds.items():
        before: int | None = branch.skip.node
        while before is not None and before not in found:
            alone = len(flow.sources[before]) == 1 and not flow.is_product(before)
            before = flow.sources[before][0] if alone else None
        first, number = (index, -1) if before is None else found[before]
        found[index] = first, number + 1
    counts = {first: number + 1 for first, number in sorted(found.values())}
    return {index: (number, counts[first]) for index, (first, number) in found.items()}
