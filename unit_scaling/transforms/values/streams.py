"""Residual streams: which adds are branches of one, and their weights.

A sum is *residual* if one term is an ancestor of the other with a layer in between, a product with
a weight of RMS 1. The ancestor is the skip connection, the other term the branch. Branches with the
same origin are found one by one (``x + f(x) + g(x)``) or, already summed (``f(x) + g(x) + x``), as
one. Updates of a state by products of values alone (the delta rule) have the coefficients of their
formula.

Two kinds of such sums are no branches. A sum that a softmax reads is a logit: its terms have a
meaning to it. A sum of data that the model returns is in the units of the data, as coordinates are:
a branch of it begins with the size that it has, often a small one (1e-3 in EGNN, arXiv 2102.09844).
The learning rate is that of a residual branch: Adam's first step moves coordinates about as far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...core.functional import completep_residual_scaling_rule
from ..record.calls import Input
from ..record.flow import Flow
from ..record.kinds import TRANSPARENT, named

_LOGITS = TRANSPARENT | named("add sub mul div masked_fill where clamp")
"""Kinds of calls between logits and their softmax."""


@dataclass
class Branch:
    """A residual branch. add: the call that adds it. skip, end: the arguments of the add. stream:
    all branches of its stream. number: its index there."""

    add: int
    skip: Input
    end: Input
    origin: int
    number: int = 0
    stream: list[Branch] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """The result of a call, as another one reads it, that has to have an RMS.

    reader, end: the indices of these calls. stream: the call whose RMS it is relative to, which
    the reader adds; None for 1. keeps: whether the result keeps the size that it has, and only the
    learning rates are those of this RMS.
    """

    reader: int
    end: int
    rms: float
    stream: int | None = None
    keeps: bool = False


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
        if flow.nodes[skip.node].numel != flow.nodes[index].numel:
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
    for branch in adds.values():
        before: int | None = branch.skip.node
        while before is not None and before not in adds:
            alone = len(flow.sources[before]) == 1 and not flow.is_product(before)
            before = flow.sources[before][0] if alone else None
        if before is not None:
            branch.stream = adds[before].stream
            branch.number = adds[before].number + 1
        branch.stream.append(branch)


def weighted_branches(
    flow: Flow, branches: Sequence[Branch], outputs: Collection[int]
) -> list[Target]:
    """The ends of the branches but for logits. outputs: the nodes of what the model returns."""
    # CompleteP (arXiv 2505.01618), table 1: the best rate does not depend on the depth.
    tau = completep_residual_scaling_rule()
    adds = {branch.add: branch for branch in branches}
    returned = {add for add in adds if _is_returned(flow, add, outputs)}
    found = []
    for branch in branches:
        if _is_logit(flow, branch.add):
            continue
        count = max(other.number for other in branch.stream) + 1
        weight = tau(branch.number, count)
        end = branch.end.node
        stream = branch.skip.node
        keeps = _in_units_of_data(flow, branch, adds, returned)
        found.append(Target(branch.add, end, weight, stream, keeps))
    return found


def _is_logit(flow: Flow, index: int) -> bool:
    """Whether a softmax reads a sum, through moves, sums and masks only."""
    kinds = {reader: flow.nodes[reader].kind for reader in flow.readers[index]}
    if "softmax" in kinds.values():
        return True
    logits = (reader for reader, kind in kinds.items() if kind in _LOGITS)
    return any(_is_logit(flow, reader) for reader in logits)


def _is_returned(
    flow: Flow,
    index: int,
    outputs: Collection[int],
) -> bool:
    """Whether a sum, moved or not, is a result of the model."""
    readers = flow.readers[index]
    moved = (r for r in readers if flow.nodes[r].kind in TRANSPARENT)
    return index in outputs or any(_is_returned(flow, r, outputs) for r in moved)


def _in_units_of_data(
    flow: Flow, branch: Branch, adds: dict[int, Branch], returned: Collection[int]
) -> bool:
    """Whether a stream begins at an input of the model and one of its sums is a result."""
    stream = branch.skip.node
    is_result = branch.add in returned
    while flow.nodes[stream].function is not None:
        if stream in adds:
            is_result |= stream in returned
            stream = adds[stream].skip.node
        elif flow.nodes[stream].kind in TRANSPARENT and len(flow.sources[stream]) == 1:
            stream = flow.sources[stream][0]
        else:
            return False
    begins = flow.nodes[stream]
    later = (adds[add] for add in returned)
    after = any(_follows(other, branch, adds) for other in later)
    return begins.parameter is None and (is_result or after)


def _follows(
    later: Branch,
    earlier: Branch,
    adds: dict[int, Branch],
) -> bool:
    """Whether a sum continues the stream of another one."""
    at: int | None = later.skip.node
    while at in adds and at != earlier.add:
        at = adds[at].skip.node
    return at == earlier.add
