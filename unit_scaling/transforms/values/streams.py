"""Residual streams: which adds are branches of one, and their weights.

A sum is *residual* if one term is an ancestor of the other with a layer in between, a product with
a weight of RMS 1. The ancestor is the skip connection, the other term the branch. Branches with the
same origin are found one by one (``x + f(x) + g(x)``) or, already summed (``f(x) + g(x) + x``), as
one. Updates of a state by products of values alone (the delta rule) have the coefficients of their
formula.

Two kinds of such sums are no branches. A sum that a softmax reads is a logit: its terms have a
meaning to it. A sum of data that the model returns is in the units of the data, as coordinates are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...core.functional import completep_residual_scaling_rule
from ..record.calls import Input
from ..record.flow import Flow
from ..record.kinds import TRANSPARENT, named

_LOGITS = TRANSPARENT | named("add sub mul div masked_fill where clamp")
"""Kinds of calls between logits and their softmax."""


@dataclass
class Branch:
    """A residual branch. add: the call that adds it. skip, end: the arguments of the add. number,
    count: its index in its stream, and their number."""

    add: int
    skip: Input
    end: Input
    origin: int
    number: int = 0
    count: int = 1


@dataclass(frozen=True)
class Weighted:
    """A residual branch: the call that adds it, the call that ends it, the one that it is added to,
    and its weight relative to that."""

    add: int
    end: int
    stream: int
    weight: float


def find_branches(flow: Flow, layers: frozenset[int]) -> list[Branch]:
    """All residual branches of a model. layers: the products with weights of RMS 1."""
    adds: dict[int, Branch] = {}
    for index, node in enumerate(flow.nodes):
        if node.kind == "add" and not node.inside:
            branch = _branch(flow, layers, adds, index)
            if branch is not None:
                adds[index] = branch
    _number(flow, adds)
    return list(adds.values())


def _branch(
    flow: Flow, layers: frozenset[int], adds: dict[int, Branch], index: int
) -> Branch | None:
    terms = flow.values(index)
    if len(terms) != 2:
        return None
    for skip, end in (terms, terms[::-1]):
        if flow.nodes[skip.node].value.numel != flow.nodes[index].value.numel:
            continue  # broadcast over positions: a shift
        origin, region = _origin(flow, adds, skip.node, end.node)
        if not layers.isdisjoint(region):
            return Branch(index, skip, end, origin)
    return None


def _origin(
    flow: Flow, adds: dict[int, Branch], skip: int, end: int
) -> tuple[int, list[int]]:
    """(origin of the branch, nodes of the branch); the origin is the nearest common ancestor."""
    at = skip
    while not (region := flow.between(at, end)):
        sources = flow.sources[at]
        if at in adds:  # x + f(x) + g(x): the second branch has the origin of the first
            at = adds[at].origin
        elif flow.nodes[at].kind in TRANSPARENT and len(sources) == 1:
            at = sources[0]
        else:
            return skip, []
    return at, region


def _number(flow: Flow, adds: dict[int, Branch]) -> None:
    """Numbers the branches of each stream: each follows the one whose sum it is added to."""
    streams: dict[int, list[Branch]] = {}
    stream_of: dict[int, list[Branch]] = {}
    for index, branch in adds.items():
        before: int | None = branch.skip.node
        while before is not None and before not in adds:
            alone = len(flow.sources[before]) == 1 and not flow.is_product(before)
            before = flow.sources[before][0] if alone else None
        if before is None:
            streams[index] = stream_of[index] = []
        else:
            stream_of[index] = stream_of[before]
            branch.number = adds[before].number + 1
        stream_of[index].append(branch)
    for stream in streams.values():
        count = max(branch.number for branch in stream) + 1
        for branch in stream:
            branch.count = count


def weighted_branches(
    flow: Flow, branches: Sequence[Branch], outputs: Collection[int]
) -> list[Weighted]:
    """Returns the branches that have a weight. outputs: the nodes of what the model returns."""
    tau = completep_residual_scaling_rule()
    returned = {
        branch.add for branch in branches if _is_returned(flow, branch.add, outputs)
    }
    adds = {branch.add: branch for branch in branches}
    found = []
    for branch in branches:
        if _is_logit(flow, branch.add) or _in_units_of_data(
            flow, branch, adds, returned
        ):
            continue
        weight = tau(branch.number, branch.count)
        found.append(Weighted(branch.add, branch.end.node, branch.skip.node, weight))
    return found


def _is_logit(flow: Flow, index: int) -> bool:
    """Whether a softmax reads a sum, through moves, sums and masks only."""
    readers = flow.readers[index]
    kinds = [flow.nodes[reader].kind for reader in readers]
    if "softmax" in kinds:
        return True
    return any(
        kind in _LOGITS and _is_logit(flow, reader)
        for kind, reader in zip(kinds, readers, strict=True)
    )


def _is_returned(flow: Flow, index: int, outputs: Collection[int]) -> bool:
    """Whether a sum, moved or not, is a result of the model."""
    if index in outputs:
        return True
    moved = [
        reader
        for reader in flow.readers[index]
        if flow.nodes[reader].kind in TRANSPARENT
    ]
    return any(_is_returned(flow, reader, outputs) for reader in moved)


def _in_units_of_data(
    flow: Flow, branch: Branch, adds: dict[int, Branch], returned: Collection[int]
) -> bool:
    """Whether a stream begins at an input of the model and one of its sums is a result."""
    stream, is_result = branch.skip.node, branch.add in returned
    while flow.nodes[stream].function is not None:
        if stream in adds:
            is_result |= stream in returned
            stream = adds[stream].skip.node
        elif flow.nodes[stream].kind in TRANSPARENT and len(flow.sources[stream]) == 1:
            stream = flow.sources[stream][0]
        else:
            return False
    begins = flow.nodes[stream].value
    after = any(
        other.add in returned and _follows(other, branch, adds)
        for other in adds.values()
    )
    return begins.parameter is None and (is_result or after)


def _follows(later: Branch, earlier: Branch, adds: dict[int, Branch]) -> bool:
    """Whether a sum continues the stream of another one."""
    at: int | None = later.skip.node
    while at in adds and at != earlier.add:
        at = adds[at].skip.node
    return at == earlier.add
