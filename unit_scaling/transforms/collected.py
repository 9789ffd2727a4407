"""Gradients that are collected: that of a value which many positions read is a sum over them.

A gate of squeeze and excitation, a shift and scale of FiLM, a node of a graph, a value that more
queries read than there are keys: the RMS of such a gradient is sqrt(n) and more. On the only path
to the loss the rules of the ops divide it away; beside a second path that would change the
gradient of what both paths come from.

So a part of the graph has a *gauge*, a power of two that all gradients in it are multiplied by.
It is put on where the part is read and taken off where it reads: every value outside has the
gradient that it had, and the parameters inside have theirs times the gauge, as those of a residual
branch have. Across a bridge of the graph any factor is allowed (Unit Scaling, section 3), and none
is taken off. The energy of gradients is followed from the loss up, as far as they are collected;
what is not known hands on what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from ..ops import find_op
from .agreement import Agreement
from .calls import AVERAGES, ELEMENTWISE, EXTREMES, PARTS, PRODUCTS, SCATTERS, TRANSPARENT
from .carried import Carried
from .flow import Flow, is_read_by_positions
from .loss import Loss
from .record import Input, Node, Slot, tensors_in
from .results import Results
from .steps import Scaling, Step, with_slots
from .sums import normalised
from .units import Unit

__all__ = ["Collected", "fixed_calls"]

_ADDS = frozenset(["add", "sub"])
_SPREADS = _ADDS | frozenset(["mul", "div"])
_READS = TRANSPARENT | frozenset(["gather"])
_KNOWN = (
    (ELEMENTWISE - {"exp"})
    | PRODUCTS
    | AVERAGES
    | SCATTERS
    | EXTREMES
    | frozenset("sum cat stack pad where masked_fill max_pool1d max_pool2d max_pool3d".split())
    | frozenset("batch_norm layer_norm rms_norm group_norm instance_norm".split())
)
"""Kinds that what is collected is followed through."""

_NEAR = 1.0
"""How many powers of 2 the RMS of a gradient may be from 1: a gauge costs a pass over it."""


@dataclass(frozen=True)
class _Part:
    """What a call hands back to an argument: the energy of the gradient without its gauge, the
    gauge, whether the gradient is collected, and whether it is that of a slice.
    """

    call: int
    slot: Slot
    energy: float
    gauge: float
    collected: bool
    slice: bool = False


def fixed_calls(
    flow: Flow, carried: Carried, results: Results, loss: Loss, preserve: bool
) -> set[int]:
    """The calls that keep the gradient that they have: those of loops, and the loss; with
    ``preserve``, all of them.
    """
    kept = {index for index in range(len(flow.nodes)) if preserve or index in carried}
    return kept | results.terms | loss.numbers | loss.above


class Collected:
    """The gauges of a graph, and the factors that put them on and off.

    fixed: calls without a gauge. weights: as `normalised` gives them. slots: call -> factors for
    the gradients of its arguments. own: the same, where they are the call's own doing.
    """

    def __init__(self, agreement: Agreement, fixed: Collection[int]) -> None:
        self.agreement, self._fixed = agreement, fixed
        self.flow, self.bridges = agreement.flow, agreement.bridges
        self.weights = normalised(self.flow)
        self.residuals, self._units = agreement.residuals, agreement.units
        self.slots: dict[int, list[Scaling]] = {}
        self.own: dict[int, list[Scaling]] = {}
        flow = self.flow
        self._pinned = self._unreached()
        self._decays = self._exponentials()
        self._closed = [d and not w for d, w in zip(flow.data, flow.wanted(), strict=True)]
        self._gauges = [1.0] * len(flow.nodes)
        found = [(1.0, False)] * len(flow.nodes)  # energy without the gauge, whether collected
        parts: list[list[_Part]] = [[] for _ in flow.nodes]
        for index in reversed(range(len(flow.nodes))):
            unit = self._units.get(index)
            end = index if unit is None else unit.calls[-1]
            found[index] = self._weighed(index, parts[index]) if end == index else found[end]
            self._gauges[index] = self._gauges[end]
            for i in flow.nodes[index].inputs:
                if i.node in flow.sources[index] and (unit is None or i.node == unit.entry):
                    parts[i.node].append(self._handed(index, i, *found[index]))

    def __contains__(self, index: int) -> bool:
        return index in self.slots or index in self.own

    def added(self, index: int, step: Step | None) -> tuple[Step, str]:
        """The step of a call with its factors, and what to say of them."""
        slots, own = self.slots.get(index, []), self.own.get(index, [])
        step = with_slots(step, slots) or Step()
        factors = dict.fromkeys(f"{backward:g}" for _, _, backward in (*own, *slots))
        why = f"gradient times {' and '.join(factors)}: collected"
        return replace(step, own=(*step.own, *own)), why

    def _unreached(self) -> set[int]:
        """Values whose gradient cannot have a factor where they are read, and who reads them so."""
        found = set[int]()
        for index, node in enumerate(self.flow.nodes):
            if node.wanted:
                found.add(index)
            elif node.function is not None and (node.key is None or node.inside):
                found |= {index, *self.flow.sources[index]}
            elif _writes(node):
                found |= {index, *(i.node for i in node.inputs if i.slot == (0,))}
        return found

    def _exponentials(self) -> set[int]:
        """Values that are no unit scale: exponentials, as they are, and their products."""
        found = set[int]()
        for index, node in enumerate(self.flow.nodes):
            handed = node.kind in TRANSPARENT | {"mul"} and found & set(self.flow.sources[index])
            if node.kind == "exp" or handed:
                found.add(index)
        return found

    def _weighed(self, index: int, parts: list[_Part]) -> tuple[float, bool]:
        """(energy of the gradient of a value, whether it is collected); notes its gauge.

        Where a path joins on which nothing is collected, its gradient alone counts.
        """
        plain = [p for p in parts if p.energy and not p.collected]
        energy, collected = sum(p.energy for p in parts), bool(parts) and not plain
        apart = self.flow.nodes[index].kind in PARTS or all(p.slice for p in parts)
        if plain and apart:
            collected = len(plain) < len(parts)
        elif plain or not parts or index in self._fixed:
            collected = False
        near = {p.gauge for p in (parts if collected else plain)} or {1.0}
        if index not in self._pinned:
            gauge = 1.0 if 1.0 in near else min(near, key=lambda g: _distance(energy * g * g))
            values = any(p.collected and self.agreement.is_attention(p.call) for p in parts)
            if collected and (values or self.flow.is_product(index)):
                gauge = _gauge(energy, gauge)
            self._gauges[index] = gauge
        energy = energy if collected else self._gauges[index] ** -2
        for p in () if self._closed[index] else parts:
            self._put(p.call, p.slot, p.energy * p.gauge**2, self._gauges[index] / p.gauge)
        return energy, collected

    def _put(self, call: int, slot: Slot, energy: float, factor: float) -> None:
        """Multiplies the gradient of an argument, of this energy."""
        if factor != 1:
            better = _distance(energy * factor**2) < _distance(energy)
            product = self.flow.is_product(call)
            factors = self.own if product and better else self.slots
            factors.setdefault(call, []).append((slot, 1.0, factor))

    # What calls hand back

    def _handed(self, index: int, i: Input, energy: float, collected: bool) -> _Part:
        node, gauge = self.flow.nodes[index], self._gauges[index]
        gain, collects = self._gain(index, node, i)
        if index in self._fixed or math.isnan(gain):
            return _Part(index, i.slot, gauge**-2, gauge, gauge != 1)
        collected = bool(gain) and (collected or collects)
        if self.bridges[index]:
            if collected and not self._pinned & {index, i.node}:
                energy *= gain * gauge**2
                self._put(index, i.slot, energy, _gauge(energy))
            return _Part(index, i.slot, 1.0, 1.0, False)
        weights, _ = self.residuals.adds.get(index, ((), ""))
        gain *= self.residuals.splits.get((index, i.slot), 1.0) ** 2
        gain *= math.prod(backward**2 for slot, _, backward in weights if slot == i.slot)
        slice = node.kind in _READS and node.numel < i.numel
        gain *= i.numel / (self.flow.nodes[i.node].numel or 1)  # of several parts, the largest
        return _Part(index, i.slot, energy * gain, gauge, collected, slice)

    def _gain(self, index: int, node: Node, i: Input) -> tuple[float, bool]:
        """(energy of the gradient of an argument for that of the result, NaN if it is not known,
        whether it collects).
        """
        copies, unit = node.numel / (i.numel or 1), self._units.get(index)
        if unit is not None and unit.name != "softmax":
            return self._of_unit(unit), False
        if unit is not None or node.kind == "softmax":
            end = index if unit is None else unit.calls[-1]
            return (math.nan if self.flow.weighs(end) is None else 0.0), False
        if index in self.weights:  # the sum takes off what all weights have in common, no more
            return float(i.node == self.flow.sources[index][0]), False
        if self.agreement.is_attention(index):
            return self.agreement.attended(index, i) * copies, True
        if node.kind in _READS:
            energy = self._summed(index, node, i, copies) if copies > 1 else copies
            return energy, copies > 1
        if node.kind not in _KNOWN or any(s in self._decays for s in self.flow.sources[index]):
            return math.nan, False
        if self.bridges[index] or index in self.residuals.adds:
            return 1.0, False  # bridges have rules without a constraint
        if node.kind in EXTREMES:
            return (copies if len(node.inputs) == 1 else math.nan), True
        if node.kind in _SPREADS and copies > 1:
            terms = len(self.flow.sources[index]) if node.kind in _ADDS else 1
            return self._summed(index, node, i, copies) / terms, True
        if node.kind in SCATTERS:
            return copies, True
        if node.kind in AVERAGES | {"sum"}:
            factor = self.agreement.average(index)
            mean = 1.0 if node.kind == "sum" else copies
            return (mean * (_output(node) if factor is None else factor)) ** 2, False
        pair = node.kind in PRODUCTS and len(self.flow.sources[index]) > 1
        return _tied(node, i), pair

    def _of_unit(self, unit: Unit) -> float:
        """The energy for each of the arguments by which the value goes in."""
        slots = [i for call in unit.calls for i in self.flow.nodes[call].inputs]
        entries = sum(i.node == unit.entry for i in slots)
        return (unit.output / unit.input) ** 2 / entries

    def _summed(self, index: int, node: Node, i: Input, copies: float) -> float:
        """The energy of a sum of so many gradients; those of positions agree."""
        positions = is_read_by_positions(self.flow.nodes[i.node].shape, node.shape)
        agrees = self.agreement.handed(index, i) if positions else 0.0
        return copies * (1 + (copies - 1) * agrees)


def _distance(energy: float) -> float:
    """How far it is from 1, in powers of 2 of the RMS."""
    return abs(math.log2(energy)) / 2 if energy else math.inf


def _gauge(energy: float, gauge: float = 1.0) -> float:
    """The gauge for a gradient of this energy: the one given, if that is near enough."""
    near = _distance(energy * gauge**2) <= _NEAR
    return gauge if near or not energy else 2.0 ** -round(math.log2(energy) / 2)


def _writes(node: Node) -> bool:
    """Whether a call writes its first argument: what a factor gives it is not to be written."""
    written = node.name.startswith("__i") or (node.name[-1:] == "_" and node.name[-2:] != "__")
    return written and (node.kind in _SPREADS or find_op(node.function) is None)


def _output(node: Node) -> float:
    """The factor of a call whose scales are tied."""
    op = find_op(node.function)
    return 1.0 if op is None else op.scales(node.args, node.kwargs, func=node.function)["output"]


def _tied(node: Node, i: Input) -> float:
    """The energy of the gradient of an operand of a product whose scales are tied."""
    op = find_op(node.function)
    if op is None:
        return 1.0
    given = op.bind(node.args, node.kwargs, node.function)
    tensors = dict((*tensors_in(node.args), *tensors_in(node.kwargs)))
    name = next((n for n, t in given.items() if t is tensors[i.slot]), "")
    scales = op.scales(node.args, node.kwargs, func=node.function, constraint=None)
    return float((scales["output"] / scales[name]) ** 2) if scales.get(name) else 1.0
