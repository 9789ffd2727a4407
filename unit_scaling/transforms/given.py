"""Numbers about what a model is called with: statistics of an input, and one number for a sample.

The mean that is taken off an input, the size that it is divided by, the trend of a series and the
noise level of an image are no activations. They meet the input or what is made of it again, and
mean something only in its units: they keep their values, and so does all that is made of them
element by element. So does what they are statistics of.

What is made of an input but meets it no more, as an average that a layer reads or rows that are
summed by an index, is a value like any other. So is a statistic within a unit (`transforms.units`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .calls import ELEMENTWISE, EXTREMES, MOVES, NEUTRAL, SCATTERS, TRANSPARENT
from .flow import Flow, reached
from .units import Unit

__all__ = ["given_calls"]

_SPELLED = frozenset(["formula", "linear form"])  # units without a statistic
_FOLLOWED = ELEMENTWISE | NEUTRAL
_NO_STATISTICS = _FOLLOWED | MOVES | SCATTERS
_REMOVES = frozenset("sub rsub div".split())
_WEIGHS = frozenset(["mul", "div"])


def given_calls(flow: Flow, units: Iterable[Unit], results: Collection[int]) -> set[int]:
    """The calls that keep their values. units: those of the model. results: those of its calls
    that are in the units of an input.
    """
    closed = {c for u in units if u.name not in _SPELLED for c in u.calls}
    starts = _starts(flow, closed)
    met: set[int] = set()
    for index in range(len(flow.nodes)):
        met |= _met(flow, index, starts, index in results)
    kept = {index for index, of in starts.items() if of and of <= met}
    above = reached(kept, flow.sources.__getitem__)
    return {index for index in above if flow.nodes[index].function is not None}


def _starts(flow: Flow, closed: set[int]) -> dict[int, set[int]]:
    """For the numbers about inputs: the statistics and inputs that each is made of."""
    starts: dict[int, set[int]] = {}
    for index, node in enumerate(flow.nodes):
        sources = flow.sources[index]
        if not flow.data[index] or index in closed:
            continue
        size = max((i.numel for i in node.inputs if i.node in sources), default=0)
        follows = node.kind in TRANSPARENT or (node.kind in _FOLLOWED and node.numel <= size)
        reduces = node.kind in EXTREMES or node.kind not in _NO_STATISTICS
        if not sources:
            starts |= {index: {index}} if node.numel == (*node.shape, 1)[0] else {}
        elif follows and all(source in starts for source in sources):
            starts[index] = set[int]().union(*(starts[source] for source in sources))
        elif reduces and node.numel < size:
            starts[index] = {index}
    return starts


def _met(flow: Flow, index: int, starts: dict[int, set[int]], result: bool) -> set[int]:
    """The statistics that a call brings together with their input or a result in its units, and
    the numbers that it multiplies a value by.
    """
    node, sources = flow.nodes[index], flow.sources[index]
    inside = [starts[s] for s in sources if s in starts]
    others = [s for s in sources if s not in starts]
    if not others or not inside:
        return set()
    found = set[int]().union(*inside)
    if result:
        return found
    if node.kind in _REMOVES and flow.data[index]:
        theirs, ours = (reached(of, flow.sources.__getitem__) for of in (others, found))
        if theirs & ours:
            return found
    single = all(flow.nodes[start].function is None for start in found)
    larger = all(node.numel > flow.nodes[start].numel for start in found)
    return found if node.kind in _WEIGHS and single and larger else set()
