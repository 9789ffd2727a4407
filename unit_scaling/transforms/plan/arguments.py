"""What the weights among the arguments of a call need, whatever the call is."""

from __future__ import annotations

import math

from ..capture.calls import ATTENTION, PRODUCTS
from ..capture.flow import Flow
from ..capture.record import Node, Slot, rms_of, tensors_in
from .selecting import one_hot
from .steps import Scaling, Settings, Step, with_slots

__all__ = ["Arguments"]

_MULTIPLY = PRODUCTS - ATTENTION - {"addmm", "baddbmm"}
"""Kinds that multiply all that they are given, but for biases."""

_SAME = 0.05
"""A computed weight whose RMS differs from that of a parameter by less is an update of it."""

_NEAR_ONE = 0.1
"""A factor of a constant that is nearer to 1 than this costs more than it gives."""


class Arguments:
    """The factors of parameters, and of what is computed from them, in the calls of a flow."""

    def __init__(self, flow: Flow, settings: Settings) -> None:
        self.flow = flow
        self._factors = settings.weights.factors
        self._split = settings.weights.split
        self._exponents = settings.weights.exponents

    def restored(self, node: Node) -> Step | None:
        """The step that brings the weights of a call back to the scale they came with."""
        found = [
            (i.slot, self._factors.get(self.flow.parameters[i.node] or "", 1.0))
            for i in node.inputs
        ]
        return with_slots(None, [(slot, f, f) for slot, f in found if f != 1.0])

    def static(self, node: Node) -> tuple[tuple[Slot, int], ...]:
        """The static scales of the weights of a product: those of their tags, and of one that is
        computed or has come later, the nearest power of two of its RMS.
        """
        found = []
        for i in node.inputs:
            source, name = self.flow.nodes[i.node], self.flow.parameters[i.node] or ""
            if source.computed and len(source.shape) > 1:
                found.append((i.slot, self._exponents.get(name) or round(math.log2(source.rms))))
        return tuple((slot, exponent) for slot, exponent in found if exponent)

    def scaled(self, node: Node) -> tuple[Scaling, ...]:
        """The factors of the arguments of a call that is scaled by its rule."""
        return (*self._computed(node), *self._constant(node))

    def _computed(self, node: Node) -> list[Scaling]:
        """Weights that are computed (by a parametrization, say) come at a scale of their own."""
        found = [
            (i.slot, 1 / self._scale(i.node))
            for i in node.inputs
            if self.flow.nodes[i.node].computed
            and self.flow.parameters[i.node] is None
            and len(self.flow.nodes[i.node].shape) > 1
        ]
        return [(slot, factor, factor) for slot, factor in found]

    def _scale(self, index: int) -> float:
        """The scale of a computed weight: its RMS; that of a parameter that it differs little from
        (a low-rank update, a mask), or 1 where a weight was split after it was divided (weight
        norm), whatever the RMS has become in training.
        """
        nodes, weight = self.flow.nodes, self.flow.nodes[index]
        for name in sorted(self.flow.weights(index) & self._factors.keys()):
            parameter = next(node for node in nodes if node.parameter == name)
            ratio = weight.rms / (self._factors[name] * parameter.rms)
            if parameter.shape == weight.shape and abs(ratio - 1) < _SAME:
                return self._factors[name]
        split = weight.path.rpartition(".")[0] in self._split
        return 1.0 if split and 0.5 <= weight.rms <= 2 else weight.rms

    def _constant(self, node: Node) -> list[Scaling]:
        """Constants come at a scale of their own: a cosine transform, a blur, the edges of a graph.

        Rows with a single one are in `selecting`.
        """
        nodes, given = self.flow.nodes, dict((*tensors_in(node.args), *tensors_in(node.kwargs)))
        if node.kind not in _MULTIPLY or one_hot(self.flow, node):
            return []
        constants = [i.slot for i in node.inputs if not nodes[i.node].live and i.numel > 1]
        found = [
            (slot, 1 / rms_of(given[slot])) for slot in constants if len(given[slot].shape) > 1
        ]
        return [(slot, factor, factor) for slot, factor in found if abs(factor - 1) > _NEAR_ONE]
