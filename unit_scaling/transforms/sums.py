"""Averages of positions that agree, and rows that are summed where an index says.

How many rows come to a sum, messages to a node of a graph say, is a matter of values; the factor is
for their mean number. It is that of the rows, as what they are added to is written in place.
"""

from __future__ import annotations

from .calls import SCATTERS
from .flow import Flow
from .record import Node
from .steps import Step

__all__ = ["summed"]

_ROWS = ((3,), ("source",), ("src",))


def summed(
    flow: Flow, index: int, bridge: bool, factor: float | None
) -> tuple[Step, str, str] | None:
    """The decision of the plan for such a call; None for any other.

    bridge: whether the gradient may have a factor of its own. factor: that of an average of values
    that agree, or of a relu of positive ones.
    """
    node = flow.nodes[index]
    if factor is None:
        return _scattered(flow, index, node, bridge) if node.kind in SCATTERS else None
    count = node.inputs[0].numel / (node.numel or 1)
    whose = "its input is mostly positive" if factor == 1 else "positions agree"
    step = Step(output=(factor, count if bridge else factor))
    return step, "scaled", f"{whose}: factor {factor:.3g}"


def _scattered(flow: Flow, index: int, node: Node, bridge: bool) -> tuple[Step, str, str] | None:
    """A sum of n rows has the factor 1/sqrt(n), and each row the gradient of the sum; a mean of n
    the factor sqrt(n), and each row 1/n of the gradient. None where they are added to values.
    """
    rows = next((i for i in node.inputs if i.slot in _ROWS), None)
    if rows is None or flow.sources[index] != [rows.node]:
        return None
    reduce = node.kwargs.get("reduce", (*node.args, *["sum"] * 5)[4])
    if node.kind != "scatter_reduce":
        reduce = "sum"
    if reduce not in ("sum", "mean"):
        return None
    count = rows.numel / (node.numel or 1) or 1.0
    factor, free = (count**-0.5, 1.0) if reduce == "sum" else (count**0.5, count)
    step = Step(slots=((rows.slot, factor, free if bridge else factor),))
    return step, "scaled", f"a {reduce} of {count:.3g} rows on average, factor {factor:.3g}"
