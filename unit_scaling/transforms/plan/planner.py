"""The planner: decides what is done at each recorded call.

A product of values and a weight has the factor of the rule of its op, a residual add has weights
for its terms, and every other call runs torch's own function.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fp8.common.report import LEFT_ALONE

from ...rules.table import find_op
from ..record.calls import CallNode, is_sparse
from ..record.flow import Flow
from ..record.kinds import EMBEDDINGS, GAINS, PRODUCTS, RECURRENT, STEPPED, TRANSPARENT, is_added
from ..record.place import Place
from .plan import CallRow, ModelPlan, Step, Steps
from .residuals import Decision, Residuals, find_residuals
from .weights import Weights


@dataclass(frozen=True)
class Decided:
    """steps: by the index of the call. rows: of the report. kept: weights that keep their values.
    inner: readout weights whose output feeds products or residual adds. depths: parameter of a
    residual branch -> the number of layers of its stack."""

    steps: dict[int, Step | None]
    rows: list[CallRow]
    kept: frozenset[str]
    inner: frozenset[str]
    depths: dict[str, int]


def by_place(nodes: list[CallNode], steps: dict[int, Step | None]) -> dict[Place, Steps]:
    """The steps of each place; one step if all of its calls have the same."""
    found: dict[Place, list[Step | None]] = defaultdict(list)
    for index, step in steps.items():
        place = nodes[index].place
        assert place is not None
        found[place].append(step)
    return {p: tuple(s) if len(set(s)) > 1 else (s[0],) for p, s in found.items()}


_NOTHING: Decision = (None, "", "")


@dataclass
class Planner:
    """Decides on recorded calls. plan: what earlier recordings have decided. weights: those of RMS
    1. replaced: the kinds of the functions that the caller replaces. changed: the parameters that
    the model changes itself when it runs."""

    nodes: list[CallNode]
    plan: ModelPlan
    weights: Weights
    replaced: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.preserve = self.plan.init == "preserve"
        self.flow = Flow(self.nodes)
        self.kept = frozenset[str]() if self.preserve else self._kept()
        self.residuals = Residuals()
        if not self.preserve:
            self.residuals = find_residuals(self.flow, self.plan.residual)
        self.inner = self._inner_readouts()

    def decided(self) -> Decided:
        steps: dict[int, Step | None] = {}
        rows: list[CallRow] = []
        for index, node in enumerate(self.nodes):
            if node.function is None:
                continue
            step, done, why = self._decide(index, node)
            if node.kind in STEPPED or node.kind in self.replaced:
                steps[index] = step
            if done and node.place not in self.plan.steps:
                why = f"{why} ({node.where})" if done == LEFT_ALONE and node.where else why
                rows.append(CallRow(node.path, node.name, done, why))
        return Decided(steps, rows, self.kept, self.inner, self.residuals.depths)

    def _kept(self) -> frozenset[str]:
        """The weights that keep their values: those that a call reads which is neither a product
        with values nor a look-up of rows, and those that no call reads. So do gains that a call
        reads which does not multiply values by them."""
        weights: set[str] = set()
        values: set[str] = set(self.changed)
        for index, node in enumerate(self.nodes):
            for i in node.inputs:
                origin = self.nodes[i.node].value.origin
                reads_shape = node.kind in TRANSPARENT and i.slot != (0,)  # or dtype, or device
                if origin is None or reads_shape:
                    continue
                if self._reads_gain(index, node, origin) or self._reads_weight(index, node, i.slot):
                    weights.add(origin)
                elif node.kind not in TRANSPARENT or node.inside:
                    values.add(origin)
        return self.weights.scaled.difference(self.plan.tags, weights - values)

    def _reads_gain(self, index: int, node: CallNode, origin: str) -> bool:
        """Whether a call multiplies values by a gain."""
        reads = origin in self.weights.gains and node.kind in GAINS and not node.inside
        return reads and bool(self.flow.values(index))

    def _reads_weight(self, index: int, node: CallNode, slot: tuple[int | str, ...]) -> bool:
        """Whether a call reads the argument in ``slot`` as the weight of a product or a table."""
        if node.inside or node.written or find_op(node.function) is None:
            return False
        if node.kind in EMBEDDINGS:
            return True
        return self.flow.is_product(index) and not is_added(node.kind, slot)

    def _inner_readouts(self) -> frozenset[str]:
        products = set(filter(self.flow.is_product, range(len(self.nodes))))
        mixes = products & self.flow.before(products.union(self.residuals.adds))
        inner = [i.node for index in mixes for i in self.nodes[index].inputs]
        origins = {self.nodes[index].value.origin for index in inner}
        return frozenset(name for name in self.weights.readouts if name in origins)

    def _scaled_weights(self, node: CallNode) -> frozenset[str]:
        """The weights of RMS 1 among the arguments that a call does not add."""
        factors = (i for i in node.inputs if not is_added(node.kind, i.slot))
        return (self.weights.scaled - self.kept) & {
            self.nodes[i.node].value.origin for i in factors
        }

    def _decide(self, index: int, node: CallNode) -> Decision:
        """(step, what the report says was done or "", why)."""
        concerns = node.value.floating and any(self.nodes[i.node].value.live for i in node.inputs)
        if not concerns:
            return _NOTHING
        if node.kind in self.replaced:
            return Step(op="replace", writes=(0,) in node.written), "replaced", "as asked"
        if node.inside:
            before = self.nodes[index - 1]
            same = (before.inside, before.path) == (node.inside, node.path)
            done = "" if before.value.live and same else LEFT_ALONE
            return None, done, f"inside {node.inside}, as all its calls"
        if self.preserve:
            return _NOTHING
        if index in self.residuals.adds:
            return self.residuals.adds[index]
        weights = self._scaled_weights(node)
        if self.flow.is_product(index) and weights:
            return self._weighted(node, weights)
        if node.kind in EMBEDDINGS and weights:
            return None, "unchanged", "rows of RMS 1"
        if node.kind in PRODUCTS | RECURRENT:
            return None, "unchanged", "no weight of RMS 1 among its operands"
        return _NOTHING

    def _weighted(self, node: CallNode, weights: frozenset[str]) -> Decision:
        """A product of values and a weight of RMS 1: the factor of its rule."""
        op = find_op(node.function)
        assert op is not None
        if is_sparse(node):
            return None, LEFT_ALONE, f"no rule for {node.name} of a sparse tensor"
        if node.kind in RECURRENT:
            return Step(op=op.name), "scaled", ""
        scales, why = op.scales(node.args, node.kwargs, func=node.function), ""
        if op.name == "linear" and weights & (self.weights.readouts - self.inner):
            scales["output"], why = scales["output"] ** 2, "readout: 1/fan_in"
        return Step(op=op.name, factor=scales["output"], names=tuple(scales)), "scaled", why
