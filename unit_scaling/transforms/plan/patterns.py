"""Patterns: functions that a model decomposes into several calls, recognised as one unit each.

A handwritten GELU, RMSNorm, softmax or rotary embedding runs unchanged, and its result is scaled as
a whole. Patterns are found by data flow, never by names:

1. *formula*: every call is elementwise in one value, with numbers: a chain or a diamond. The factor
   of its result is computed by quadrature.
2. `UNITS`: all paths from one call meet again in another, without a product in between. The factor
   of the result is measured (`measure.measuring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...rules.elementwise import elementwise_rms
from ..capture.dataflow import Flow, reached
from ..capture.kinds import CASTS, ELEMENTWISE, LINEAR, MOVES
from ..capture.record import CallNode, Key, Slot, replaced

__all__ = ["UNITS", "Pattern", "Unit", "find_units"]


@dataclass(frozen=True)
class Pattern:
    """A kind of unit: it has a call of each of the sets ``needs``, and all of its calls are in
    ``only``.
    """

    needs: tuple[frozenset[str], ...]
    only: frozenset[str]


_REDUCTIONS = frozenset("mean sum var std norm vector_norm amax max logsumexp".split())
_ROOTS = frozenset("rsqrt sqrt pow norm vector_norm std var".split())
_FORMED = ELEMENTWISE | MOVES | _REDUCTIONS

UNITS: dict[str, Pattern] = {
    "softmax": Pattern((frozenset(["exp"]), frozenset(["sum"]), frozenset(["div"])), _FORMED),
    "norm": Pattern((_ROOTS, frozenset(["mul", "div"]), _REDUCTIONS), _FORMED),
    "centring": Pattern((frozenset(["mean"]), frozenset(["sub"])), _FORMED),
    "linear form": Pattern((frozenset(["add", "sub"]), frozenset(["mul"])), LINEAR | MOVES),
}
"""Name -> pattern of the units that are not formulas; the first match applies."""


@dataclass(frozen=True)
class Unit:
    """Calls that form one function; the last one returns the result.

    factor: of the result; None if it is measured.
    """

    name: str
    calls: tuple[int, ...]
    factor: float | None = None


def find_units(
    flow: Flow, alone: Callable[[CallNode], bool], settled: dict[Key, float]
) -> dict[int, Unit]:
    """Returns the units of a model by their last call.

    alone: whether a call has a rule of its own. settled: factors of formulas, fixed by their last
    call; new ones are added.
    """
    found: dict[int, Unit] = {}
    taken: set[int] = set()
    for last in reversed(range(len(flow.nodes))):
        unit = None if last in taken else _unit(flow, last)
        if unit is not None and not taken.intersection(unit.calls):
            found[last] = unit
            taken.update(unit.calls)
    factors: dict[str, float] = {}
    for entry, calls in _formulas(flow, taken):
        plain = [c for c in calls if flow.nodes[c].kind not in CASTS]
        ruled = len(plain) == 1 and alone(flow.nodes[plain[0]])
        if not ruled and any(_curved(flow, c) for c in plain):
            factor = _factor(flow, entry, calls, settled, factors)
            if math.isfinite(factor):
                found[calls[-1]] = Unit("formula", calls, factor)
    return found


_STEPS = 4
"""How many forks to search upwards for a unit: the exp of a softmax precedes its fork."""


def _unit(flow: Flow, last: int) -> Unit | None:
    """The unit that ends at a call where paths meet."""
    entry = flow.parents[last]
    if entry < 0 or len(flow.sources[last]) < 2:
        return None
    found = None
    for _ in range(_STEPS):
        calls = _region(flow, entry, last)
        name = _match(flow, calls) if calls else None
        if name is not None:
            found = Unit(name, calls)
        if name not in (None, "softmax") or not calls or flow.parents[entry] < 0:
            break
        entry = flow.parents[entry]
    return found


def _region(flow: Flow, entry: int, last: int) -> tuple[int, ...]:
    """The calls between two calls where all paths meet; () if a call cannot be in a unit."""

    def is_formed(index: int) -> bool:
        return flow.nodes[index].kind in _FORMED and not flow.nodes[index].inside

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


def _match(flow: Flow, calls: tuple[int, ...]) -> str | None:
    """The pattern that the calls match; None for a formula."""
    if all(_acts_on_elements(flow, c) for c in calls):
        return None
    kinds = [flow.nodes[c].kind for c in calls]
    # a product or quotient of two values is not linear
    kinds += ["square" for c in calls if flow.nodes[c].kind in ("mul", "div") and _curved(flow, c)]
    for name, pattern in UNITS.items():
        if pattern.only.issuperset(kinds) and all(n.intersection(kinds) for n in pattern.needs):
            return name
    return None


def _curved(flow: Flow, index: int) -> bool:
    """Whether an elementwise call is more than a multiple of its input."""
    node = flow.nodes[index]
    live = [i for i in node.inputs if i.node in flow.sources[index]]
    return node.kind not in LINEAR or len(live) > 1 or flow.inverts(index)


# Formulas


_ROUNDS = 8
"""The maximum number of cuts of formulas at values used outside; two are usually enough."""


def _formulas(flow: Flow, taken: set[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(entry, calls) of every maximal formula: elementwise calls on one value and numbers."""
    suitable = [i for i in range(len(flow.nodes)) if i not in taken and _acts_on_elements(flow, i)]
    ends: set[int] = set()
    for _ in range(_ROUNDS):
        entry = _entries(flow, suitable, ends)
        more = {i for i, e in entry.items() if not _inside(entry, e, flow.readers[i])}
        if more <= ends:
            break
        ends |= more
    found: list[tuple[int, tuple[int, ...]]] = []
    for last in sorted(ends & entry.keys()):
        calls = _upwards(flow, last, entry)
        if not ends.intersection(calls[:-1]):
            found.append((entry[last][0], calls))
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
    flow: Flow,
    entry: int,
    calls: tuple[int, ...],
    settled: dict[Key, float],
    factors: dict[str, float],
) -> float:
    """1/RMS of a formula of a standard normal variable; NaN if it is constant or not finite.

    factors: of this plan, by the text of the formula.
    """
    key = flow.nodes[calls[-1]].key
    assert key is not None
    if key not in settled:
        text = _text(flow, entry, calls)
        if text not in factors:
            factors[text] = _integrated(flow, entry, calls)
        settled[key] = factors[text]
    return settled[key]


def _text(flow: Flow, entry: int, calls: tuple[int, ...]) -> str:
    place = {entry: "input"} | {call: f"call {i}" for i, call in enumerate(calls)}
    parts = []
    for node in (flow.nodes[call] for call in calls):
        given = node.tensors
        marks: dict[Slot, Any] = {
            i.slot: place.get(i.node) or repr(given[i.slot].item()) for i in node.inputs
        }
        parts += [node.name, repr((replaced(node.args, marks), replaced(node.kwargs, marks)))]
    return "\n".join(parts)


def _integrated(flow: Flow, entry: int, calls: tuple[int, ...]) -> float:
    try:
        with torch.inference_mode(False), torch.enable_grad():
            output, slope = elementwise_rms(lambda x: _run(flow, entry, calls, x), 1.0, ())
    except ValueError:
        return math.nan
    return 1 / output if 0 < slope < math.inf else math.nan


def _run(flow: Flow, entry: int, calls: tuple[int, ...], x: Tensor) -> Tensor:
    """The result of a formula for another input."""
    values = {entry: x}
    for call in calls:
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
    return values[calls[-1]]
