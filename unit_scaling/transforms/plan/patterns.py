"""Patterns: functions that a model decomposes into several calls, recognised as one unit each.

A handwritten GELU, RMSNorm, softmax or rotary embedding runs unchanged, and its result is scaled as
a whole. `UNITS` defines the patterns by data flow, never by names:

1. *formula*: every call is elementwise in one value, with numbers: a chain or a diamond.
2. others: all paths from one call meet again in another, without a product in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...rules.elementwise import elementwise_rms
from ..capture.dataflow import Flow, reached
from ..capture.kinds import CASTS, ELEMENTWISE, LINEAR, MOVES
from ..capture.record import CallNode, Key, Slot, replaced, tensors_in

__all__ = ["UNITS", "Pattern", "Unit", "find_units", "run_calls", "run_unit"]


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
    """Calls that form one function. entry: the node of its input; the last call returns the result.

    output: the factor of the result.
    """

    name: str
    entry: int
    calls: tuple[int, ...]
    output: float = 1.0


def find_units(
    flow: Flow, alone: Callable[[CallNode], bool], settled: dict[Key, float]
) -> dict[int, Unit]:
    """Returns the units of a model by their last call.

    alone: whether a call has a rule of its own. settled: factors fixed by their last call; new ones
    are added.
    """
    found = {}
    spelled: dict[str, float] = {}
    for unit in _candidates(flow, alone):
        last = unit.calls[-1]
        key = flow.nodes[last].key
        assert key is not None
        if key not in settled:
            spelling = _spelling(flow, unit)
            if spelling not in spelled:
                spelled[spelling] = _measured(flow, unit)
            settled[key] = spelled[spelling]
        if math.isfinite(settled[key]) and settled[key] > 0:
            found[last] = replace(unit, output=settled[key])
    return found


def _candidates(flow: Flow, alone: Callable[[CallNode], bool]) -> list[Unit]:
    found: list[Unit] = []
    taken: set[int] = set()
    for last in reversed(range(len(flow.nodes))):
        unit = None if last in taken else _unit(flow, last)
        if unit is not None and not taken.intersection(unit.calls):
            found.append(unit)
            taken.update(unit.calls)
    for entry, calls in _formulas(flow, taken):
        plain = [c for c in calls if flow.nodes[c].kind not in CASTS]
        ruled = len(plain) == 1 and alone(flow.nodes[plain[0]])
        if not ruled and any(_curved(flow, c) for c in plain):
            found.append(Unit("formula", entry, calls))
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
            found = Unit(name, entry, calls)
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


# Factors

SAMPLES, MOST_DRAWS = 2**14, 64
"""The minimum number of samples for a unit, and the maximum number of draws of its input."""

_NEAR_ONE = 0.05
"""A sampled factor closer to 1 than this is set to 1: it would cost more than it gains."""


def _measured(flow: Flow, unit: Unit) -> float:
    """The factor of a unit; NaN if its result is constant or not finite."""
    with torch.inference_mode(False), torch.enable_grad():
        return _integrated(flow, unit) if unit.name == "formula" else _sampled(flow, unit)


def _spelling(flow: Flow, unit: Unit) -> str:
    place = {unit.entry: "input"} | {call: f"call {i}" for i, call in enumerate(unit.calls)}
    parts = [unit.name, "" if unit.name == "formula" else str(_entry_shape(flow, unit))]
    for call in unit.calls:
        node = flow.nodes[call]
        tensors = node.tensors
        marks: dict[Slot, Any] = {
            i.slot: place.get(i.node) or _mark(tensors[i.slot]) for i in node.inputs
        }
        parts += [node.name, repr((replaced(node.args, marks), replaced(node.kwargs, marks)))]
    return "\n".join(parts)


def _mark(tensor: Tensor) -> str:
    return repr(tensor.item() if tensor.numel() == 1 else tuple(tensor.shape))


def _integrated(flow: Flow, unit: Unit) -> float:
    """1/RMS of a formula of a standard normal variable, by quadrature."""
    try:
        output, slope = elementwise_rms(lambda x: run_unit(flow, unit, x), 1.0, ())
    except ValueError:
        return math.nan
    return 1 / output if 0 < slope < math.inf else math.nan


def _sampled(flow: Flow, unit: Unit) -> float:
    """1/RMS of the result for standard normal samples."""
    shape = _entry_shape(flow, unit)
    draws = min(MOST_DRAWS, -(-SAMPLES // max(1, math.prod(shape))))
    generator = torch.Generator().manual_seed(0)
    squares = 0.0
    for _ in range(draws):
        result = run_unit(flow, unit, torch.randn(shape, generator=generator))
        squares += result.detach().float().square().mean().item() / draws
    factor = squares**-0.5 if squares else math.nan
    return 1.0 if abs(factor - 1) < _NEAR_ONE else factor


def _entry_shape(flow: Flow, unit: Unit) -> tuple[int, ...]:
    """The shape of the input of a unit, which may be one of several results of a call."""
    for node in (flow.nodes[call] for call in unit.calls):
        given = node.tensors
        for i in node.inputs:
            if i.node == unit.entry:
                return tuple(given[i.slot].shape)
    return flow.nodes[unit.entry].shape


def run_unit(flow: Flow, unit: Unit, x: Tensor) -> Tensor:
    """The result of a unit for another input."""
    return run_calls(flow, unit.calls, {unit.entry: x})[unit.calls[-1]][0]


def run_calls(
    flow: Flow, calls: tuple[int, ...], inputs: dict[int, Tensor]
) -> dict[int, list[Tensor]]:
    """Runs calls in order, with given tensors in place of the results of some nodes."""
    values: dict[int, list[Tensor]] = {}
    device = next((x.device for x in inputs.values()), None)
    for call in calls:
        node = flow.nodes[call]
        given = node.tensors
        tensors: dict[Slot, Any] = {
            i.slot: values[i.node][i.part].clone()  # the call may write in place
            if i.node in values
            else inputs[i.node].clone()
            if i.node in inputs
            else given[i.slot].detach().clone().to(device or given[i.slot].device)
            for i in node.inputs
        }
        assert node.function is not None
        output = node.function(*replaced(node.args, tensors), **replaced(node.kwargs, tensors))
        values[call] = [t for _, t in tensors_in(output)]
    return values
