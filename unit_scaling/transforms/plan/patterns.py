"""Patterns: functions that a model decomposes into several calls, recognised as one unit each.

A handwritten GELU, RMSNorm, softmax or rotary embedding runs unchanged, and its result is scaled as
a whole. Patterns are found by data flow, never by names or forms:

1. *formula*: every call is elementwise in one value, with numbers: a chain or a diamond. The factor
   of its result is computed by quadrature.
2. *pattern*: all paths from one call meet again in another, without a product in between: the terms
   depend on each other. The factor of the result is measured (`measure.measuring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...rules.elementwise import elementwise_rms
from ..capture.dataflow import Flow, reached
from ..capture.kinds import CASTS, ELEMENTWISE, FORMED, LINEAR, MOVES
from ..capture.record import CallNode, Key, Slot, replaced
from .regions import Region

__all__ = ["find_units"]


def find_units(
    flow: Flow, alone: Callable[[CallNode], bool], settled: dict[Key, float]
) -> list[Region]:
    """Returns the patterns and formulas of a model; their last call returns the result.

    alone: whether a call has a rule of its own. settled: factors of formulas, fixed by their last
    call; new ones are added.
    """
    found: list[Region] = []
    taken: set[int] = set()
    for last in reversed(range(len(flow.nodes))):
        calls = () if last in taken else _pattern(flow, last)
        if calls and taken.isdisjoint(calls):
            found.append(_region_of(calls, "pattern"))
            taken.update(calls)
    factors: dict[str, float] = {}
    for formula in _formulas(flow, taken):
        plain = [c for c in formula.calls if flow.nodes[c].kind not in CASTS]
        ruled = len(plain) == 1 and alone(flow.nodes[plain[0]])
        if not ruled and any(_curved(flow, c) for c in plain):
            factor = _factor(flow, formula, settled, factors)
            if math.isfinite(factor):
                found.append(_region_of(formula.calls, "formula", factor))
    return found


def _region_of(calls: tuple[int, ...], name: str, factor: float | None = None) -> Region:
    what = f"{name} of {len(calls)} calls" if len(calls) > 1 else f"{name} of one call"
    return Region(frozenset(calls), what, frozenset(calls[-1:]), factor)


_STEPS = 4
"""How many calls to search upwards for the begin of a pattern."""


def _pattern(flow: Flow, last: int) -> tuple[int, ...]:
    """The calls of the largest pattern that ends at a call where paths meet; () if there is none.

    It begins at a fork: the paths of a softmax, ``e / e.sum()``, part at its exp, those of its
    shift, ``x - x.amax()``, before it.
    """
    found: tuple[int, ...] = ()
    entry = flow.parents[last] if len(flow.sources[last]) > 1 else -1
    for _ in range(_STEPS):
        calls = _region(flow, entry, last) if entry >= 0 else ()
        if not calls:
            break
        if len(flow.readers[entry]) > 1 and not all(_acts_on_elements(flow, c) for c in calls):
            found = calls
        entry = flow.parents[entry]
    return found if any(flow.nodes[c].kind not in MOVES for c in found) else ()


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
    live = [i for i in node.inputs if i.node in flow.sources[index]]
    return node.kind not in LINEAR or len(live) > 1 or flow.inverts(index)


# Formulas


_ROUNDS = 8
"""The maximum number of cuts of formulas at values used outside; two are usually enough."""


class _Formula(NamedTuple):
    """Elementwise calls on one value, the result of ``entry``, and numbers."""

    entry: int
    calls: tuple[int, ...]


def _formulas(flow: Flow, taken: set[int]) -> list[_Formula]:
    """The maximal formulas without the calls ``taken``."""
    suitable = [i for i in range(len(flow.nodes)) if i not in taken and _acts_on_elements(flow, i)]
    ends: set[int] = set()
    for _ in range(_ROUNDS):
        entry = _entries(flow, suitable, ends)
        more = {i for i, e in entry.items() if not _inside(entry, e, flow.readers[i])}
        if more <= ends:
            break
        ends |= more
    found: list[_Formula] = []
    for last in sorted(ends & entry.keys()):
        calls = _upwards(flow, last, entry)
        if not ends.intersection(calls[:-1]):
            found.append(_Formula(entry[last][0], calls))
    return found


def _entries(flow: Flow, suitable: list[int], ends: set[int]) -> dict[int, tuple[int, int]]:
    """Call -> (node, index of its result) that the call is a formula of.

    Calls in ``ends`` may only be the start or the end of a formula.
    """
    entry: dict[int, tuple[int, int]] = {}
    for index in suitable:
        inputs = [i for i in flow.nodes[index].inputs if i.node in flow.sources[index]]
        places = [(i.node, i.part) for i in inputs]
        origins = {place if place[0] in ends else entry.get(place[0], place) for place in places}
        if len(origins) == 1:
            entry[index] = origins.pop()
    return entry


def _inside(entry: dict[int, tuple[int, int]], origin: tuple[int, int], readers: list[int]) -> bool:
    return bool(readers) and all(entry.get(reader) == origin for reader in readers)


def _upwards(flow: Flow, last: int, entry: dict[int, tuple[int, int]]) -> tuple[int, ...]:
    def sources(index: int) -> list[int]:
        return [s for s in flow.sources[index] if entry.get(s) == entry[last]]

    return tuple(sorted(reached([last], sources)))


def _acts_on_elements(flow: Flow, index: int) -> bool:
    node = flow.nodes[index]
    if node.kind not in ELEMENTWISE or node.inside or not flow.sources[index]:
        return False
    sources = set(flow.sources[index])
    others = [flow.nodes[i.node] for i in node.inputs if i.node not in sources]
    numbers = all(o.numel == 1 and not o.live for o in others)
    return numbers and all(flow.nodes[s].numel == node.numel for s in sources)


# Factors of formulas


def _factor(
    flow: Flow, formula: _Formula, settled: dict[Key, float], factors: dict[str, float]
) -> float:
    """1/RMS of a formula of a standard normal variable; NaN if it is constant or not finite.

    factors: of this plan, by the text of the formula.
    """
    key = flow.nodes[formula.calls[-1]].key
    assert key is not None
    if key not in settled:
        text = _text(flow, formula)
        if text not in factors:
            factors[text] = _integrated(flow, formula)
        settled[key] = factors[text]
    return settled[key]


def _text(flow: Flow, formula: _Formula) -> str:
    place = {formula.entry: "input"} | {c: f"call {i}" for i, c in enumerate(formula.calls)}
    parts = []
    for node in (flow.nodes[call] for call in formula.calls):
        given = node.tensors
        marks: dict[Slot, Any] = {
            i.slot: place.get(i.node) or repr(given[i.slot].item()) for i in node.inputs
        }
        parts += [node.name, repr((replaced(node.args, marks), replaced(node.kwargs, marks)))]
    return "\n".join(parts)


def _integrated(flow: Flow, formula: _Formula) -> float:
    try:
        with torch.inference_mode(False), torch.enable_grad():
            output, slope = elementwise_rms(lambda x: _run(flow, formula, x), 1.0, ())
    except ValueError:
        return math.nan
    return 1 / output if 0 < slope < math.inf else math.nan


def _run(flow: Flow, formula: _Formula, x: Tensor) -> Tensor:
    """The result of a formula for another input."""
    values = {formula.entry: x}
    for call in formula.calls:
        node = flow.nodes[call]
        given = node.tensors
        tensors: dict[Slot, Any] = {
            i.slot: values[i.node].clone()  # the call may write in place
            if i.node in values
            else given[i.slot].detach().clone().to(x.device)
            for i in node.inputs
        }
        assert node.function is not None
        values[call] = node.function(
            *replaced(node.args, tensors), **replaced(node.kwargs, tensors)
        )
    return values[formula.calls[-1]]
