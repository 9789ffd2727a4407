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

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ...core.functional import completep_residual_scaling_rule
from ..record.calls import Input
from ..record.flow import Flow, reached
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


def find_branches(flow: Flow, layers: set[int]) -> list[Branch]:
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
    flow: Flow, layers: set[int], adds: dict[int, Branch], index: int
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
    kept = _in_units_of_data(flow, branches, outputs)
    found = []
    for branch in branches:
        if _is_logit(flow, branch.add):
            continue
        count = max(other.number for other in branch.stream) + 1
        weight = tau(branch.number, count)
        end = branch.end.node
        stream = branch.skip.node
        found.append(Target(branch.add, end, weight, stream, branch.add in kept))
    return found


def _is_logit(flow: Flow, index: int) -> bool:
    """Whether a softmax reads a sum, through moves, sums and masks only."""
    moved = _through(flow, [index], _LOGITS)
    readers = {reader for each in moved for reader in flow.readers[each]}
    return any(flow.nodes[reader].kind == "softmax" for reader in readers)


def _through(flow: Flow, calls: Iterable[int], kinds: Collection[str]) -> set[int]:
    """Some calls, and what reads their results through calls of these kinds only."""

    def readers(index: int) -> list[int]:
        return [r for r in flow.readers[index] if flow.nodes[r].kind in kinds]

    return reached(calls, readers)


def _in_units_of_data(
    flow: Flow, branches: Sequence[Branch], outputs: Collection[int]
) -> set[int]:
    """The sums of streams that begin at an input of the model, and of which a sum is a result."""
    skips = {branch.add: branch.skip.node for branch in branches}
    found = set[int]()
    for add in skips:
        sums = set[int]()
        at = add
        while flow.nodes[at].function is not None:
            if at in skips:
                sums.add(at)
                at = skips[at]
            elif flow.nodes[at].kind in TRANSPARENT and len(flow.sources[at]) == 1:
                at = flow.sources[at][0]
            else:
                break
        is_input = flow.nodes[at].function is None and not flow.nodes[at].parameter
        moved = _through(flow, sums, TRANSPARENT)
        if is_input and not moved.isdisjoint(outputs):
            found |= sums
    return found
