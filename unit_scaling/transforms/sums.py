"""Averages of positions that agree, and rows that are summed where an index says.

How many rows come to a sum, messages to a node of a graph say, is a matter of values; the factor is
for their mean number. It is that of the rows, as what they are added to is written in place.

Weights that are divided by a sum of them by index add up to 1, as those of a softmax over the
neighbours of a node: that sum keeps its values, and one of rows times such weights is an average.
"""

from __future__ import annotations

from collections.abc import Mapping

from .calls import PARTS, SCATTERS, SELECTIONS, TRANSPARENT
from .flow import Flow
from .record import Node, rms_of, tensors_in
from .steps import Decision, Step

__all__ = ["normalised", "summed"]

_ROWS = ((3,), ("source",), ("src",))
_READS = TRANSPARENT | frozenset("gather add clamp clamp_min maximum".split())


def normalised(flow: Flow) -> dict[int, int]:
    """Quotients that add up to 1 by index -> the sums by index that they are divided by."""
    found = {}
    for index, node in enumerate(flow.nodes):
        if node.kind == "div" and flow.inverts(index) and len(flow.sources[index]) == 2:
            dividend, at = flow.sources[index]
            while (above := flow.up(at, _READS)) is not None:
                at = above
            rows = flow.up(at, SCATTERS)
            if rows is not None and _moved(flow, rows) == _moved(flow, dividend):
                found[index] = at
    return found


def _moved(flow: Flow, index: int) -> int:
    """The value that others are views or copies of, whole."""
    whole = TRANSPARENT - SELECTIONS - PARTS
    while (above := flow.up(index, whole)) is not None:
        index = above
    return index


def summed(
    flow: Flow, index: int, bridge: bool, factor: float | None, weights: Mapping[int, int]
) -> Decision | None:
    """The decision of the plan for such a call; None for any other.

    bridge: whether the gradient may have a factor of its own. factor: that of an average of values
    that agree, or of a relu of positive ones. weights: as `normalised` gives them.
    """
    node = flow.nodes[index]
    if factor is None and index in weights.values():
        return None, "unchanged", "the sum of weights that are divided by it"
    if factor is None:
        known = node.kind in SCATTERS
        return _scattered(flow, index, node, bridge, weights) if known else None
    count = node.inputs[0].numel / (node.numel or 1)
    whose = "its input is mostly positive" if factor == 1 else "positions agree"
    step = Step(output=(factor, count if bridge else factor))
    return step, "scaled", f"{whose}: factor {factor:.3g}"


def _scattered(
    flow: Flow, index: int, node: Node, bridge: bool, weights: Mapping[int, int]
) -> Decision | None:
    """A sum of n rows has the factor 1/sqrt(n), and each row the gradient of the sum; a mean of n
    the factor sqrt(n), and each row 1/n of the gradient. Numbers that rows are multiplied by are
    taken out by their RMS. None where rows are added to values.
    """
    rows = next((i for i in node.inputs if i.slot in _ROWS), None)
    if rows is None or flow.sources[index] != [rows.node]:
        return None
    reduce = node.kwargs.get("reduce", (*node.args, *["sum"] * 5)[4])
    if node.kind != "scatter_reduce":
        reduce = "sum"
    if reduce not in ("sum", "mean"):
        return None
    row = flow.nodes[_moved(flow, rows.node)]
    if row.kind == "mul" and any(_moved(flow, i.node) in weights for i in row.inputs):
        reduce = "mean"
    count, weight = rows.numel / (node.numel or 1) or 1.0, _constant(flow, row)
    factor, free = (count**-0.5, 1.0) if reduce == "sum" else (count**0.5, count)
    factor, backward = factor / weight, (free if bridge else factor) / weight
    step = Step(slots=((rows.slot, factor, backward),))
    return step, "scaled", f"a {reduce} of {count:.3g} rows on average, factor {factor:.3g}"


def _constant(flow: Flow, row: Node) -> float:
    """The RMS of the numbers that rows are multiplied by, 1 for none: those of a graph, say."""
    given = dict(tensors_in(row.args)) if row.kind == "mul" else {}
    numbers = [given[i.slot] for i in row.inputs if not flow.nodes[i.node].live and i.slot in given]
    found = [rms_of(t) for t in numbers if t.numel() > 1]
    return found[0] if found else 1.0
