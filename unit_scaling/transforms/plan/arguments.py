"""Scale factors for the weights and one-hot rows among the arguments of a call, and the shares of
parameters that join values.

A product with one-hot rows (letters, codes) is a table lookup. Each entry of its result is one
entry of the weight, not a sum over fan-in, and each row of the weight receives only its share of
the gradient. Such rows are therefore scaled to RMS 1, like other values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ..capture.dataflow import Flow
from ..capture.kinds import EMBEDDINGS, RECURRENT, TRANSPARENT
from ..capture.record import CallNode, Key, Slot
from ..capture.values import has_values, is_strided
from .actions import Scaling, Settings, Step, with_slots

_CHANNELS = frozenset("conv1d conv2d conv3d".split())
_ROWS = RECURRENT | frozenset("linear matmul mm".split())

_JOINS = frozenset("add sub cat stack where".split())
"""Kinds whose result consists of its tensor arguments, its terms."""

_COMPARABLE = 2.0
"""Terms whose RMS differs by at most this factor have the rule of the op: equal shares."""

_SAME = 0.05
"""A computed weight whose RMS differs less than this from a parameter's is an update of it."""


class Arguments:
    """The factors of parameters, and of tensors computed from them, as arguments of calls."""

    def __init__(self, flow: Flow, settings: Settings, learned: Collection[int]) -> None:
        self.flow, self._learned = flow, learned
        self._weights, self._settled = settings.weights, settings.settled.weights

    def restored(self, node: CallNode) -> Step | None:
        """The step that multiplies the weights of a call back to their original scale."""
        factors = self._weights.restored if node.computed else self._weights.factors
        found = [
            (i.slot, factors.get(self.flow.nodes[i.node].origin or "", 1.0)) for i in node.inputs
        ]
        return with_slots(None, [(slot, f, f) for slot, f in found if f != 1.0])

    def static(self, node: CallNode) -> tuple[tuple[Slot, int], ...]:
        """The static scale exponents of a product's weights: those of their tags, or of the RMS for
        a weight without a tag (computed or added later)."""
        found = []
        for i in node.inputs:
            source = self.flow.nodes[i.node]
            if source.computed and len(source.shape) > 1:
                tagged = self._weights.exponents.get(source.origin or "")
                found.append((i.slot, tagged or round(math.log2(source.rms))))
        return tuple((slot, exponent) for slot, exponent in found if exponent)

    def computed(self, node: CallNode) -> list[Scaling]:
        """Divides computed weights (of a parametrization, for example) by the scale that they had
        in the first plan: training, or random numbers in them, change it."""
        if node.key is None:  # a replay does not see it
            return []
        sources = ((i, self.flow.nodes[i.node]) for i in node.inputs)
        weights = [i for i, s in sources if s.computed and s.origin is None and len(s.shape) > 1]
        found: list[Scaling] = []
        for i in weights:
            place = node.key, i.slot
            if place not in self._settled:
                self._settled[place] = 1 / self._scale(i.node)
            found.append((i.slot, self._settled[place], self._settled[place]))
        return found

    def _scale(self, index: int) -> float:
        """The scale of a computed weight: the factor of a parameter that it is an update of (a
        low-rank update, a mask), 1 for a weight that was split after it was divided (weight norm),
        whatever its RMS has become in training, and otherwise its RMS."""
        nodes, weight, factors = self.flow.nodes, self.flow.nodes[index], self._weights.factors
        for name in sorted(self.flow.weights(index) & factors.keys()):
            parameter = next(node for node in nodes if node.parameter == name)
            ratio = weight.rms / (factors[name] * parameter.rms)
            if parameter.shape == weight.shape and abs(ratio - 1) < _SAME:
                return factors[name]
        split = weight.path.rpartition(".")[0] in self._weights.split
        return 1.0 if split and 0.5 <= weight.rms <= 2 else weight.rms

    def one_hot(self, node: CallNode) -> list[Scaling]:
        """The factor of a one-hot first argument of a product."""
        if node.kind not in _CHANNELS | _ROWS:
            return []
        slot, first = next(iter(node.tensors.items()))
        at = node.inputs[0].node
        source = self.flow.nodes[at]
        if source.computed or (source.live and at in self._learned):
            return []  # a weight, or computed from one
        dim = 1 if node.kind in _CHANNELS else -1
        if first.dim() < 2 or first.shape[dim] < 2 or not _is_one_hot(first, dim):
            return []
        factor = float(first.shape[dim]) ** 0.5
        return [(slot, factor, factor)]


@torch.no_grad()
def _is_one_hot(tensor: Tensor, dim: int) -> bool:
    floats = tensor.is_floating_point() and is_strided(tensor) and tensor.numel() > 0
    if not floats or not has_values([tensor]):
        return False
    ones = tensor == 1
    return bool((ones.sum(dim) == 1).all()) and bool((ones | (tensor == 0)).all())


# Shares
#
# The positions and the class token of a vision transformer are small beside the patches that they
# join. If every parameter had RMS 1 there, they would be as large, and hide the patches.


def joined(
    node: CallNode, nodes: Sequence[CallNode], factors: Mapping[str, float]
) -> dict[Slot, CallNode]:
    """The terms of a call that joins a parameter, or rows of one, with values; none for another.
    factors: the divisors of parameters, by name."""
    if node.key is None or node.kind not in _JOINS or node.numel == 1 or node.computed:
        return {}
    terms = {i.slot: nodes[i.node] for i in node.inputs if nodes[i.node].live}
    own = [term for term in terms.values() if term.computed]
    looked_up = any(_is_looked_up(term, nodes) for term in terms.values())
    joins = len(terms) > 1 and bool(own or looked_up) and all(t.origin in factors for t in own)
    return terms if joins else {}


def _is_looked_up(node: CallNode, nodes: Sequence[CallNode]) -> bool:
    while node.kind in TRANSPARENT and node.inputs:
        node = nodes[node.inputs[0].node]
    return node.kind in EMBEDDINGS


def find_shares(
    nodes: Sequence[CallNode], factors: Mapping[str, float]
) -> dict[Key, tuple[Scaling, ...]]:
    """Returns, for each such call, the factors of its terms: the RMS of a term over that of the
    result; none if its terms are comparable. nodes: of a `Recorder` of ``original`` values."""
    found: dict[Key, tuple[Scaling, ...]] = {}
    for node in nodes:
        terms = joined(node, nodes, factors)
        sizes = {s: factors[t.origin or ""] if t.computed else t.rms for s, t in terms.items()}
        if node.key is None or not sizes:
            continue
        comparable = max(sizes.values()) <= _COMPARABLE * min(sizes.values())
        shares = {} if comparable else {slot: size / node.rms for slot, size in sizes.items()}
        found[node.key] = tuple((slot, share, share) for slot, share in shares.items())
    return found
