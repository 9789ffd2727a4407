"""Patterns: functions that a model decomposes into several calls, recognised as one unit each.

They run unchanged, and the result is scaled as a whole. They are found by data flow:

1. *formula*: every call is elementwise in one value, with numbers: a chain or a diamond. The factor
   of its result is computed by quadrature.
2. *pattern*: all paths from one call meet again in another, without a product in between: the terms
   depend on each other. The factor of the result is measured (`measure.measuring`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from ...rules.elementwise import elementwise_rms
from ...rules.table import find_op
from ..capture.dataflow import Flow, reached
from ..capture.kinds import CASTS, ELEMENTWISE, FORMED, LINEAR, MOVES
from ..capture.record import Key, replaced
from .regions import Region


def find_units(flow: Flow, settled: dict[Key, float]) -> list[Region]:
    """Returns the patterns and formulas of a model; their last call returns the result. settled:
    factors of formulas, fixed by their last call; new ones are added."""
    found: list[Region] = []
    taken: set[int] = set()
    for last in reversed(range(len(flow.nodes))):
        calls = () if last in taken else _pattern(flow, last)
        if calls and taken.isdisjoint(calls):
            found.append(_region_of(calls, "pattern"))
            taken.update(calls)
    for last in reversed(range(len(flow.nodes))):
        calls = () if last in taken else _formula(flow, last, taken)
        taken.update(calls)
        plain = [c for c in calls if flow.nodes[c].kind not in CASTS]
        ruled = len(plain) == 1 and find_op(flow.nodes[plain[0]].function) is not None
        if not ruled and any(_curved(flow, c) for c in plain):
            factor = _factor(flow, calls, settled)
            if math.isfinite(factor):
                found.append(_region_of(calls, "formula", factor))
    return found


def _region_of(calls: tuple[int, ...], name: str, factor: float | None = None) -> Region:
    what = f"{name} of {len(calls)} calls" if len(calls) > 1 else f"{name} of one call"
    return Region(frozenset(calls), what, frozenset(calls[-1:]), factor)


_STEPS = 4
"""How many calls to search upwards for the begin of a pattern."""


def _pattern(flow: Flow, last: int) -> tuple[int, ...]:
    """The calls of the largest pattern that ends at a call where paths meet; () if there is none.
    It begins at a fork, as ``e`` is in ``e / e.sum()``."""
    found: tuple[int, ...] = ()
    ending = _ending(flow, last) if len(flow.sources[last]) > 1 else iter(())
    for entry, calls in islice(ending, _STEPS):
        if len(flow.readers[entry]) > 1 and not all(_acts_on_elements(flow, c) for c in calls):
            found = calls
    return found if any(flow.nodes[c].kind not in MOVES for c in found) else ()


def _formula(flow: Flow, last: int, taken: set[int]) -> tuple[int, ...]:
    """The longest chain or diamond of elementwise calls on one value that ends at a call."""
    found: tuple[int, ...] = ()
    for _, calls in _ending(flow, last):
        if not (taken.isdisjoint(calls) and all(_acts_on_elements(flow, c) for c in calls)):
            break
        found = calls
    return found


def _ending(flow: Flow, last: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(entry, calls) of the regions that end at a call, each with those before."""
    entry = flow.parents[last]
    while entry >= 0 and (calls := _region(flow, entry, last)):
        yield entry, calls
        entry = flow.parents[entry]


def _region(flow: Flow, entry: int, last: int) -> tuple[int, ...]:
    """The calls between two calls where all paths meet; () if they are no pattern."""

    def is_formed(index: int) -> bool:
        return flow.nodes[index].kind in FORMED and not flow.nodes[index].inside

    def sources(index: int) -> set[int]:
        return set(flow.sources[index]) - {entry} if is_formed(index) else set()

    found = reached([last], sources)
    if not all(map(is_formed, found)):
        return ()
    calls = tuple(sorted(found))
    if len({i.part for c in calls for i in flow.nodes[c].inputs if i.node == entry}) > 1:
        return ()
    closed = all(found.issuperset(flow.readers[c]) for c in calls[:-1])
    return calls if closed else ()


def _curved(flow: Flow, index: int) -> bool:
    """Whether an elementwise call is more than a multiple of its input."""
    node = flow.nodes[index]
    return node.kind not in LINEAR or len(flow.values(index)) > 1 or flow.inverts(index)


def _acts_on_elements(flow: Flow, index: int) -> bool:
    node = flow.nodes[index]
    if node.kind not in ELEMENTWISE or node.inside or not flow.sources[index]:
        return False
    sources = set(flow.sources[index])
    others = [flow.nodes[i.node] for i in node.inputs if i.node not in sources]
    numbers = all(o.numel == 1 and not o.live for o in others)
    return numbers and all(flow.nodes[s].numel == node.numel for s in sources)


# Factors of formulas


def _factor(flow: Flow, calls: tuple[int, ...], settled: dict[Key, float]) -> float:
    """1/RMS of a formula of a standard normal variable; NaN if it is constant or not finite."""
    key = flow.nodes[calls[-1]].key
    assert key is not None
    if key not in settled:
        try:
            with torch.inference_mode(False), torch.enable_grad():
                output, slope = elementwise_rms(lambda x: _run(flow, calls, x), 1.0, ())
        except ValueError:
            output = slope = math.nan
        settled[key] = 1 / output if 0 < slope < math.inf else math.nan
    return settled[key]


def _run(flow: Flow, calls: tuple[int, ...], x: Tensor) -> Tensor:
    """The result of a formula for another input."""
    values = dict[int, Tensor]()
    for call in calls:
        node, given = flow.nodes[call], flow.nodes[call].tensors
        own = {i.slot: values.get(i.node, x) for i in flow.values(call)}
        others = {slot: t.detach() for slot, t in given.items() if slot not in own}
        # Copies, as the call may write in place.
        tensors = {slot: t.clone().to(x.device) for slot, t in {**own, **others}.items()}
        assert node.function is not None
        args, kwargs = replaced(node.args, tensors), replaced(node.kwargs, tensors)
        values[call] = node.function(*args, **kwargs)
    return values[calls[-1]]
