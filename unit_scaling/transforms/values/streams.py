"""Residual streams: which adds are branches of one, and their weights.

The planner finds adds of a value and of a result that a layer computes from it. Two kinds of them
are no branches. A sum that a softmax reads is a logit: its terms have a meaning to it. A sum of
data that the model returns is in the units of the data, as coordinates are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...core.functional import completep_residual_scaling_rule
from ..plan.planner import Branch, Flow
from ..record.kinds import TRANSPARENT, named

_LOGITS = TRANSPARENT | named("add sub mul div masked_fill where clamp")
"""Kinds of calls between logits and their softmax."""


@dataclass(frozen=True)
class Weighted:
    """A residual branch: the call that adds it, the call that ends it, the one that it is added to,
    and its weight relative to that."""

    add: int
    end: int
    stream: int
    weight: float


def find_branches(
    flow: Flow, branches: Sequence[Branch], outputs: Collection[int]
) -> list[Weighted]:
    """The branches of streams. outputs: the nodes of what the model returns."""
    tau = completep_residual_scaling_rule()
    returned = {branch.add for branch in branches if _is_returned(flow, branch.add, outputs)}
    adds = {branch.add: branch for branch in branches}
    found = []
    for branch in branches:
        if _is_logit(flow, branch.add) or _in_units_of_data(flow, branch, adds, returned):
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
    moved = [reader for reader in flow.readers[index] if flow.nodes[reader].kind in TRANSPARENT]
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
    after = any(other.add in returned and _follows(other, branch, adds) for other in adds.values())
    return begins.parameter is None and (is_result or after)


def _follows(later: Branch, earlier: Branch, adds: dict[int, Branch]) -> bool:
    """Whether a sum continues the stream of another one."""
    at: int | None = later.skip.node
    while at in adds and at != earlier.add:
        at = adds[at].skip.node
    return at == earlier.add
