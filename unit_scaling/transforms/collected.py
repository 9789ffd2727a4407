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
from .calls import AVERAGES, SCATTERS, TRANSPARENT
from .flow import Flow
from .record import Input, Node, Slot, tensors_in
from .residuals import Residuals
from .steps import Scaling, Step, with_slots

__all__ = ["Collected"]

_ADDS = frozenset(["add", "sub"])
_SPREADS = _ADDS | frozenset(["mul", "div"])
_READS = TRANSPARENT | frozenset(["gather"])
_PAIRS = frozenset("matmul bmm mm".split())
_NEAR = 1.0
"""How many powers of 2 the RMS of a gradient may be from 1: a gauge costs a pass over it."""


@dataclass(frozen=True)
class _Part:
    """What a call hands back to an argument: the energy of the gradient without its gauge, the
    gauge, and whether the gradient is collected.
    """

    call: int
    slot: Slot
    energy: float
    gauge: float
    collected: bool


class Collected:
    """The gauges of a graph, and the factors that put them on and off.

    fixed: calls that have none: the loss, and loops. slots: call -> factors for the gradients of
    its arguments. own: the same, where they are the call's own doing.
    """

    def __init__(
        self,
        flow: Flow,
        bridges: list[bool],
        residuals: Residuals,
        agreement: Agreement,
        fixed: Collection[int],
    ) -> None:
        self.flow, self.bridges, self.residuals = flow, bridges, residuals
        self.agreement, self._fixed = agreement, fixed
        self.slots: dict[int, list[Scaling]] = {}
        self.own: dict[int, list[Scaling]] = {}
        closed = [d and not w for d, w in zip(flow.data, flow.wanted(), strict=True)]
        self._pinned = self._unreached()
        self._gauges = [1.0] * len(flow.nodes)
        parts: list[list[_Part]] = [[] for _ in flow.nodes]
        for index in reversed(range(len(flow.nodes))):
            energy, collected = self._gauge(index, parts[index])
            for p in () if closed[index] else parts[index]:
                before, after = self._gauges[index], p.gauge
                self._put(p.call, p.slot, p.energy * after**2, before / after)
            for i in flow.nodes[index].inputs:
                if i.node in flow.sources[index]:
                    parts[i.node].append(self._handed(index, i, energy, collected))

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
            if node.function is not None and (node.key is None or node.inside):
                found |= {index, *self.flow.sources[index]}
            elif node.name.endswith("_") and not node.name.endswith("__"):
                written = {i.node for i in node.inputs if i.slot == (0,)}
                found |= {index, *written} if written & set(self.flow.sources[index]) else set()
        return found

    def _gauge(self, index: int, parts: list[_Part]) -> tuple[float, bool]:
        """(energy of the gradient of a value, whether it is collected); notes its gauge."""
        if not parts or index in self._fixed:
            return 1.0, False
        energy, collected = sum(p.energy for p in parts), any(p.collected for p in parts)
        if index in self._pinned or not energy:
            return energy, collected
        gauge = min(sorted({p.gauge for p in parts}), key=lambda g: _distance(energy * g * g))
        callers = [p.call for p in parts if p.collected]
        if collected and any(map(self.flow.is_product, [index, *callers])):
            gauge = _gauge(energy, gauge)
        self._gauges[index] = gauge
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
        if index in self._fixed:
            return _Part(index, i.slot, 1.0, self._gauges[index], False)
        node, gauge = self.flow.nodes[index], self._gauges[index]
        gain, collects = self._gain(index, node, i)
        collected = bool(gain) and (collected or collects)
        if self.bridges[index]:
            energy *= gain * gauge**2
            if collected and i.node not in self._pinned and index not in self._pinned:
                self._put(index, i.slot, energy, _gauge(energy))
            return _Part(index, i.slot, 1.0, 1.0, False)
        weights, _ = self.residuals.adds.get(index, ((), ""))
        gain *= self.residuals.splits.get((index, i.slot), 1.0) ** 2
        gain *= math.prod(backward**2 for slot, _, backward in weights if slot == i.slot)
        return _Part(index, i.slot, energy * gain, gauge, collected)

    def _gain(self, index: int, node: Node, i: Input) -> tuple[float, bool]:
        """(energy of the gradient of an argument for that of the result, whether it collects)."""
        copies = node.numel / (i.numel or 1)
        if self.agreement.is_attention(index):
            return self.agreement.attended(index, i) * copies, True
        if node.kind in _READS:
            energy = self._summed(index, node, i, copies) if copies > 1 else copies
            return energy, copies > 1
        if self.bridges[index]:
            return 1.0, False  # its rule has no constraint
        if node.kind in _SPREADS and copies > 1:
            terms = len(self.flow.sources[index]) if node.kind in _ADDS else 1
            return self._summed(index, node, i, copies) / terms, True
        if node.kind in _PAIRS and len(self.flow.sources[index]) > 1:
            return _tied(node, i), True
        if node.kind in AVERAGES:
            factor = self.agreement.average(index)
            return (copies * (_output(node) if factor is None else factor)) ** 2, False
        return (_output(node) ** 2, False) if node.kind == "sum" else (1.0, False)

    def _summed(self, index: int, node: Node, i: Input, copies: float) -> float:
        """The energy of a sum of so many gradients; those of positions agree."""
        here, there = node.shape, self.flow.nodes[i.node].shape
        agrees = 0.0 if _repeats_features(there, here) else self.agreement.handed(index, i)
        return copies * (1 + (copies - 1) * agrees)



def _distance(energy: float) -> float:
    """How far it is from 1, in powers of 2 of the RMS."""
    return abs(math.log2(energy)) / 2 if energy else math.inf


def _gauge(energy: float, gauge: float = 1.0) -> float:
    """The gauge for a gradient of this energy: the one given, if that is near enough."""
    near = _distance(energy * gauge**2) <= _NEAR
    return gauge if near or not energy else 2.0 ** -round(math.log2(energy) / 2)


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


def _repeats_features(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Whether one row of features is read by each of them, (B, T, 1) by (B, T, C)."""
    padded = (1,) * (len(large) - len(small)) + small
    repeated = [d for d, (a, b) in enumerate(zip(padded, large, strict=False)) if a != b]
    return repeated == [len(large) - 1] or (repeated == [1] and len(large) > 3)
