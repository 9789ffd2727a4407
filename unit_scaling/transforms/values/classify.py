"""What the parameters of a model are, from the calls that read them.

A weight is what products and tables read as one, and nothing reads in another way. Every other
parameter keeps its values. The rule of a product's op has the factor of its weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property

from ...parameter import Tags
from ...rules.table import find_op
from ..record.calls import CallNode, Input, Recorder
from ..record.flow import Flow, reached
from ..record.kinds import (
    ATTENTION,
    EMBEDDINGS,
    GAINS,
    JOINS,
    NORMS,
    RECURRENT,
    TRANSPARENT,
)
from ..record.values import is_strided, rms_of
from .streams import Branch, find_branches


class Classes:
    """The classes of the parameters in a recorded pass. tags: of the parameters, by name."""

    def __init__(self, seen: Recorder, tags: Mapping[str, Tags]) -> None:
        self.flow = Flow(seen.nodes)
        self._nodes = seen.nodes
        self._tags = tags
        self._outputs = seen.outputs
        self._changed = seen.changed
        #: The weights and gains that were divided by their RMS.
        self.scaled = frozenset(n for n, each in tags.items() if each.mup_divisor)
        self._readouts = frozenset(
            n for n, each in tags.items() if each.mup_type == "output"
        )

    @cached_property
    def branches(self) -> list[Branch]:
        """All sums of a value and of what layers compute from it, in order."""
        layers: dict[frozenset[str], list[int]] = defaultdict(list)
        for index in filter(self._is_layer, range(len(self._nodes))):
            layers[self._weights(self._nodes[index])].append(index)
        # Sums in a loop over a layer (a recurrence, the steps of a solver) have the coefficients of
        # their formula.
        before = self.flow.before
        # With weights in such sums, a Neural ODE with steps of Runge and Kutta diverged.
        once: set[int] = set()
        for at in layers.values():
            if at[0] not in before(at[-1:]):
                once.update(at)
        return find_branches(self.flow, once)

    @cached_property
    def kept(self) -> frozenset[str]:
        """The scaled weights that keep their values: those that a call reads of which `_is_weight`
        is false, those that no call reads, and tables whose rows are `_as_given`."""
        weights = set[str]()
        values = self._as_given() | self._changed
        for index, i, origin in self._reads():
            is_gain = origin in self.scaled and self._tags[origin].mup_type == "norm"
            if self._is_weight(index, i, is_gain):
                weights.add(origin)
            else:
                values.add(origin)
        return self.scaled - (weights - values)

    @property
    def inside(self) -> dict[str, str]:
        """Parameter that a call reads inside of an autograd function -> that, in words."""
        found = {}
        for index, _, name in self._reads():
            if inside := self._nodes[index].inside:
                found[name] = f"read inside of {inside}, whose gradient is its own"
        return found

    @property
    def weights(self) -> set[str]:
        """The parameters that a product or a table reads as its weight."""
        return {name for at, i, name in self._reads() if self._is_weight(at, i, False)}

    @cached_property
    def added(self) -> dict[str, float]:
        """The kept weights that calls only add to values or put beside them (positions, a class
        token): name -> the RMS of these values."""
        sizes: dict[str, list[float]] = defaultdict(list)
        others = {*self._changed}
        for index, i, origin in self._reads():
            node = self._nodes[index]
            values = self.flow.values(index)
            joins = node.kind in JOINS or i in node.added
            if joins and values and not node.inside:
                tensors = node.tensors
                sizes[origin] += [rms_of(tensors[value.slot]) for value in values]
            else:
                others.add(origin)
        kept = self.kept - others
        return {name: max(found) for name, found in sizes.items() if name in kept}

    @cached_property
    def inner(self) -> frozenset[str]:
        """The weights that were taken for the readout and feed products or residual adds."""
        indices = range(len(self._nodes))
        products = set(filter(self.flow.is_product, indices))
        mixes = products & self.flow.before(products.union(self._adds))
        inner = (i for index in mixes for i in self._nodes[index].inputs)
        return self._readouts.intersection(map(self.flow.origin, inner))

    def factor(self, index: int) -> float | None:
        """The factor of the rule of a call; None if that is no product of values and a weight of
        RMS 1."""
        node = self._nodes[index]
        weights = self._weights(node) - self.kept
        if node.inside or not (weights and self.flow.is_product(index)):
            return None
        # A query that is a parameter is an operand: its size is that of logits.
        if node.kind in ATTENTION or not all(map(is_strided, node.tensors.values())):
            return None
        op = find_op(node.function)
        if op is None or node.kind in RECURRENT:
            return 1.0
        factor: float = op.scales(node.args, node.kwargs, func=node.function)["output"]
        is_readout = op.name == "linear" and weights & (self._readouts - self.inner)
        if is_readout:
            return factor**2
        return factor

    @cached_property
    def _adds(self) -> frozenset[int]:
        return frozenset(branch.add for branch in self.branches)

    def _is_layer(self, index: int) -> bool:
        """Whether a call is a product of values and a weight that was divided by its RMS."""
        return self.flow.is_product(index) and bool(self._weights(self._nodes[index]))

    def _weights(self, node: CallNode) -> frozenset[str]:
        """The scaled weights among the arguments that a call does not add."""
        return self.scaled.intersection(map(self.flow.origin, node.factors))

    def _reads(self) -> Iterator[tuple[int, Input, str]]:
        """The arguments that are parameters, or moved ones: (index of the call, argument, name)."""
        for index, node in enumerate(self._nodes):
            for i in node.inputs:
                origin = self.flow.origin(i)
                is_given = node.inside and i.slot == (0,)
                moves = node.kind in TRANSPARENT and not is_given
                if origin is not None and not moves:
                    yield index, i, origin

    def _as_given(self) -> set[str]:
        """The tables whose rows, by their sizes, make what the model returns: by formulas, without
        a product with a weight, a norm or a residual add, which bring values to RMS 1. Results
        that other calls read (hidden states) do not count."""
        ends = {i for i in self._outputs if not self.flow.readers[i]}

        def before(i: int) -> list[int]:
            return [] if self._normalizes(i) else self.flow.sources[i]

        given = set[str]()
        for index in reached(ends, before) - ends:
            if self._nodes[index].kind in EMBEDDINGS:
                given |= self._weights(self._nodes[index])
        return given

    def _normalizes(self, index: int) -> bool:
        is_norm = self._nodes[index].kind in NORMS
        return is_norm or index in self._adds or self._is_layer(index)

    def _is_weight(self, index: int, i: Input, is_gain: bool) -> bool:
        """Whether a call multiplies values by a gain, or reads the argument ``i`` as the weight
        of a product or a table."""
        node = self._nodes[index]
        if node.inside:
            return False
        if is_gain and node.kind in GAINS and self.flow.values(index):
            return True
        if node.written or find_op(node.function) is None:
            return False
        product = self.flow.is_product(index) and i in node.factors
        return product or node.kind in EMBEDDINGS
