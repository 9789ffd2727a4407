"""Rows that are summed where an index says: messages of a graph, tokens of experts.

How many rows come to a sum is a matter of values; the rule is for their mean number. The factor is
that of the rows, as what they are added to is often written in place.
"""

from __future__ import annotations

from .calls import SCATTERS
from .flow import Flow
from .steps import Step

__all__ = ["scattered"]

_SOURCES = ((3,), ("source",), ("src",))


def scattered(flow: Flow, index: int, bridge: bool) -> tuple[Step, str, str] | None:
    """The decision of the plan for a sum of rows onto zeros; None for any other call.

    n rows to a sum, on average, have the factor 1/sqrt(n); each gets the gradient of its sum, which
    is not scaled on a bridge. A mean of n has the factor sqrt(n).
    """
    node = flow.nodes[index]
    rows = next((i for i in node.inputs if i.slot in _SOURCES), None)
    if node.kind not in SCATTERS or rows is None or flow.sources[index] != [rows.node]:
        return None
    reduce = node.kwargs.get("reduce", (*node.args, *["sum"] * 5)[4])
    if node.kind == "scatter_reduce" and reduce not in ("sum", "mean"):
        return None
    count = rows.numel / (node.numel or 1) or 1.0
    mean = node.kind == "scatter_reduce" and reduce == "mean"
    factor = count**0.5 if mean else count**-0.5
    backward = (count if mean else 1.0) if bridge else factor
    step = Step(slots=((rows.slot, factor, backward),))
    return step, "scaled", f"{count:.3g} rows to each, factor {factor:.3g}"
