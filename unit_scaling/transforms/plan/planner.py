"""The planner: turns recorded calls into a `Plan` of scale factors.

The first row of `DECIDERS` that applies to a call decides.

Where log2 of a result's RMS differs from 0 by more than `measure.measuring.REACH`, the factor is
corrected by measurement. Where that of an operand of a product does (of one that keeps its values,
for example), the operand is multiplied by a power of two and the result divided by it. The gauges
of all gradients are measured too (`measure.gauge`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fp8.common.report import LEFT_ALONE

from ...rules.table import find_op
from ..capture.dataflow import Flow
from ..capture.kinds import (
    ALGEBRA,
    ATTENTION,
    CASTS,
    ELEMENTWISE,
    KEPT,
    LAYERS,
    NEUTRAL,
    PRODUCTS,
    RECURRENT,
    TRANSPARENT,
    is_added,
)
from ..capture.record import DISTRIBUTION, CallNode, Slot, is_sparse
from ..capture.values import has_scale
from .actions import CallRow, Decision, Plan, Settings, Step
from .arguments import Arguments
from .attention import Attention
from .interior import Interior, consumers, cosines, distances, limited
from .patterns import find_units
from .regions import Region, Regions
from .residuals import Residuals, find_residuals
from .weights import SMALL

_NOTHING: Decision = (None, "", "")
_OUTSIDE = "not between two layers: keeps its values"
_DISTANCE = "in a distance whose argmin is taken: keeps its values"
_COSINE = "cosine after the last layer"
_LIMITED = "value whose logarithm or the like is taken"


@dataclass(frozen=True)
class Planned:
    """A plan, the flow it was made from, and what the measurement needs to know about its calls.

    rows: the call of each row of the plan. checked: calls whose factor the measurement may correct.
    unruled: those of them whose factor is measured alone: results of regions.
    products: those whose operands the measurement may give factors to -> the slot of the bias or
    None.
    settled: calls that use the factor of another sequence length, for which their result has RMS 1.
    small: (call, argument) -> log2 of the RMS of a small parameter that nothing makes up for.
    exponents: of the gauges, once they are chosen.
    """

    plan: Plan
    flow: Flow
    rows: list[int]
    checked: frozenset[int]
    unruled: frozenset[int]
    products: Mapping[int, Slot | None]
    settled: frozenset[int]
    small: Mapping[tuple[int, Slot], float]
    exponents: list[int] = field(default_factory=list)


def make_plan(nodes: list[CallNode], settings: Settings) -> Planned:
    """Returns the plan for recorded calls: the factors of values, with true gradients."""
    planner = _Planner(nodes, settings)
    depths = planner.residuals.depths if settings.residual == "umup" else {}
    plan = Plan(inner=planner.inner, depths=depths, in_pairs=not settings.preserve)
    checked, products = set[int](), dict[int, Slot | None]()
    rows: list[int] = []
    small = dict[tuple[int, Slot], float]()
    for index, node in enumerate(nodes):
        if node.function is None:
            continue
        step, row = planner.decide(index, node)
        if node.key is not None:
            plan.steps[node.key] = step
        if node.key is not None and not settings.preserve and _is_multilinear(node):
            products[index] = _bias(node)
        small |= planner.settle_small(index, node)
        if row is not None:
            plan.rows.append(row)
            rows.append(index)
            if planner.is_checked(index, row):
                checked.add(index)
    settled = frozenset(planner.attention.of_others)
    unruled = frozenset(filter(planner.is_unruled, checked))
    return Planned(plan, planner.flow, rows, frozenset(checked), unruled, products, settled, small)


def _bias(node: CallNode) -> Slot | None:
    """The slot of the bias of a linear layer or convolution."""
    if node.kind not in LAYERS:
        return None
    return next((i.slot for i in node.inputs if is_added(node.kind, i.slot)), None)


def _is_multilinear(node: CallNode) -> bool:
    """Whether a call is a product of its tensors, or that and a bias."""
    if node.kind not in PRODUCTS - ATTENTION or node.inside or node.written or is_sparse(node):
        return False
    given = [t for t in node.tensors.values() if has_scale(t)]
    return len(given) == 2 + (_bias(node) is not None) or node.kind == "einsum"


class _Planner:
    def __init__(self, nodes: list[CallNode], settings: Settings) -> None:
        self.settings = settings
        self.nodes = nodes
        self.flow = flow = Flow(nodes)
        self.interior = Interior(flow, settings.whole)
        self.residuals = Residuals()
        self.regions: dict[int, Region] = {}
        if not settings.preserve:
            self._find_regions()
        self.inner = self._inner_readouts()
        self.arguments = Arguments(flow, settings)
        self.attention = Attention(flow, settings)
        self.consumers = consumers(nodes)
        self.distances = distances(self.consumers)

    def _find_regions(self) -> None:
        """Finds the regions, and the residual adds between them; the last that holds a call keeps
        it."""
        flow, settings, interior = self.flow, self.settings, self.interior
        closed = Regions(flow, interior)
        matrices = closed.formulas()
        inside = {call for region in matrices for call in region.calls}
        self.residuals = find_residuals(flow, settings.residual, inside)
        carried = closed.loops(self.residuals.adds, settings.settled.loops)
        inside = inside.union(*(region.calls for region in carried))
        for unit in find_units(flow, settings.settled.units):
            if inside.isdisjoint(unit.calls) and all(last in interior for last in unit.exits):
                self.regions |= dict.fromkeys(unit.calls, unit)
        bounded = {i for i in limited(flow, interior) & interior.calls if self._has_one_factor(i)}
        alone = dict.fromkeys(bounded, _LIMITED) | dict.fromkeys(cosines(flow, interior), _COSINE)
        self.regions |= {i: Region(frozenset([i]), what) for i, what in alone.items()}
        for region in (*carried, *matrices):
            self.regions |= dict.fromkeys(region.calls, region)

    def _inner_readouts(self) -> frozenset[str]:
        """The readout weights whose output feeds layers or residual adds."""
        mixes = self.flow.before(
            {*self.residuals.adds, *filter(self.flow.is_product, range(len(self.nodes)))}
        )
        inner: set[str | None] = set()
        for index in range(len(self.nodes)):
            if self.flow.is_product(index) and mixes[index]:
                inner |= {self.nodes[i.node].origin for i in self.nodes[index].inputs}
        named = frozenset(name for name in inner if name is not None)
        return named & self.settings.weights.readouts

    def _has_one_factor(self, index: int) -> bool:
        """Whether a call is elementwise, or the last one of a unit."""
        region = self.regions.get(index)
        return self.nodes[index].kind in ELEMENTWISE if region is None else index in region.exits

    def is_checked(self, index: int, row: CallRow) -> bool:
        """Whether a measurement may correct the factor of a call."""
        node = self.nodes[index]
        chosen = index in self.residuals.adds or row.why.startswith("readout")
        if chosen or index in self.attention.of_others or self.settings.preserve:
            return False
        if row.done not in ("scaled", LEFT_ALONE) or index in self.distances:
            return False
        if node.inside or node.key is None:  # a replay does not see the call
            return False
        return index in self.interior or self.flow.is_product(index)

    def is_unruled(self, index: int) -> bool:
        """Whether no rule has a factor for the result of a region."""
        return index in self.regions and self.regions[index].factor is None

    def settle_small(self, index: int, node: CallNode) -> dict[tuple[int, Slot], float]:
        """Settles that no measurement makes up for a small parameter that keeps its values, such as
        the factor of a branch: it learns at the rate of one of RMS 1, so its steps would be too
        large. Returns as `Planned.small`.
        """
        found: dict[tuple[int, Slot], float] = {}
        if node.key is None or node.kind not in PRODUCTS | {"mul"} or node.computed:
            return found
        settings = self.settings
        for i in node.inputs:
            source = self.nodes[i.node]
            kept = source.origin is not None and source.origin not in settings.weights.factors
            if kept and source.rms < SMALL and not is_added(node.kind, i.slot):
                settings.settled.corrections.setdefault(node.place, 0)
                settings.settled.operands.setdefault((node.key, i.slot), 0)
                found[index, i.slot] = math.log2(source.rms)
        return found

    def decide(self, index: int, node: CallNode) -> tuple[Step | None, CallRow | None]:
        """The step for a call and its row in the report."""
        kind, number = node.key[1:] if node.key is not None else (node.name, 0)
        concerns = node.floating and any(self.nodes[i.node].live for i in node.inputs)
        step, done, why = self._choose(index, node, kind) if concerns else _NOTHING
        if done == LEFT_ALONE and node.where:
            why = f"{why} ({node.where})"
        return step, CallRow(node.path, node.name, done, why, number) if done else None

    def _choose(self, index: int, node: CallNode, kind: str) -> Decision:
        for decider in DECIDERS:
            decision = decider(self, index, node, kind)
            if decision is not None:
                return decision
        raise AssertionError("the last decider applies to every call")

    # Deciders, in the order of the table

    def _replaced(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A function that the caller replaces."""
        if kind not in self.settings.replaced:
            return None
        return Step(op="replace"), "replaced", "as asked"

    def _inside(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A call inside an autograd function, which computes its gradient itself: left alone."""
        if not node.inside:
            return None
        done = "unchanged" if node.inside == DISTRIBUTION else LEFT_ALONE
        before = self.nodes[index - 1]
        done = "" if before.live and node.continues(before) else done
        return self.arguments.restored(node), done, f"inside {node.inside}, as all its calls"

    def _preserved(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """With init="preserve", any call: a product has static scales for the casts of weights."""
        if not self.settings.preserve:
            return None
        static = self.arguments.static(node) if kind in PRODUCTS else ()
        if not static:
            return _NOTHING
        scales = ", ".join(f"{2.0**exponent:g}" for _, exponent in static)
        return Step(static=static), "preserved", f"static scale {scales}"

    def _distance(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A call of a distance whose argmin is taken: keeps its values."""
        return (None, "unchanged", _DISTANCE) if index in self.distances else None

    def _weight(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A call that computes a weight from parameters: uses the original values."""
        if not node.computed:
            return None
        if kind in TRANSPARENT:
            return _NOTHING
        step = self.arguments.restored(node)
        if node.key is None:
            unseen = any(
                self.nodes[i.node].origin in self.settings.weights.unseen for i in node.inputs
            )
            done = LEFT_ALONE if unseen and not node.written else ""
            return None, done, f"computes a weight by {node.name}, from parameters of RMS 1"
        return step, "unchanged" if step else "", "computes a weight, from parameters as they were"

    def _region(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A call of a region: runs as in the model; a result that leaves it has one factor."""
        region = self.regions.get(index)
        if region is None:
            return None
        step = self.arguments.restored(node)
        if index in region.exits:
            if region.factor is None:
                return step, "scaled", f"result of a {region.what}"
            step = replace(step or Step(), output=region.factor)
            return step, "scaled", f"result of a {region.what}, factor {region.factor:.3g}"
        named = self.flow.is_product(index) or kind in ALGEBRA or index == region.first
        return step, "unchanged" if named else "", f"in a {region.what}: keeps its values"

    def _residual(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A residual add: the weights of its terms."""
        if index not in self.residuals.adds:
            return None
        slots, why = self.residuals.adds[index]
        return Step(slots=tuple((s, f, f) for s, f in slots)), "scaled", why

    def _outside(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A call outside the `interior`: keeps its values, unless it is a layer."""
        if index in self.interior or self.flow.is_layer(index):
            return None
        restored = self.arguments.restored(node)
        if restored is not None and node.key is None:
            return None, LEFT_ALONE, f"no rule for {node.name}, which reads parameters of RMS 1"
        silent = kind in NEUTRAL | CASTS and restored is None
        return restored, "" if silent or find_op(node.function) is None else "unchanged", _OUTSIDE

    def _share(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A sum, a concatenation or a choice of values and a much smaller or larger parameter: each
        has the share that it had in the model as it was."""
        slots = () if node.key is None else self.settings.settled.shares.get(node.key)
        if not slots:
            return None
        shares = ", ".join(f"{factor:.2g}" for _, factor, _ in slots)
        return Step(slots=slots), "scaled", f"terms keep their shares, {shares}"

    def _add(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A sum: of values of RMS 1 by its rule, of numbers, masks, constants and biases as it
        is."""
        if kind not in ("add", "sub"):
            return None
        sources = [self.nodes[i.node] for i in node.inputs]
        if len(sources) < 2:
            return None, "unchanged", "adds a number"
        if node.numel == 1:
            return None, "unchanged", "adds single numbers"
        if any(source.masking for source in sources):
            return None, "unchanged", "adds a mask"
        if not all(source.live for source in sources):
            return None, "unchanged", "adds a constant"
        if set(self.consumers[index].values()) == {"detach"}:
            return None, "unchanged", "is detached: the rest of a straight-through gradient"
        weights = [source.origin for source in sources if source.computed]
        if weights and not any(name in self.settings.weights.factors for name in weights):
            return None, "unchanged", "adds a bias"
        return (Step(op="add"), "scaled", "") if node.kind == "add" else None

    def _mul(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A value times or over a number, which is taken out, a constant or a gain."""
        if kind not in ("mul", "div") or self.flow.inverts(index):
            return None
        values = self.flow.sources[index]
        numbers = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, int | float)]
        others = [self.nodes[i.node] for i in node.inputs if i.node not in values]
        if len(values) == 1 and node.numel > 1 and not any(o.live or o.numel > 1 for o in others):
            sign = math.copysign(1.0, numbers[0]) if numbers else 1.0
            return Step(op="times", factor=sign), "scaled", "a number, taken out"
        if len(values) == 1 and any(o.computed for o in others):
            return None, "scaled", "a gain"
        if len(values) == 1 and not any(o.live for o in others):
            return None, "scaled", "times a constant"
        return None

    def _attention(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """Attention, and the products and softmax that it is composed of."""
        return self.attention.decide(index, node)

    def _by_rule(self, index: int, node: CallNode, kind: str) -> Decision:
        """Any call: the rule of its op, with the true gradient of the scaled function."""
        assert node.function is not None
        op = find_op(node.function)
        if op is None or is_sparse(node):
            return self._without_rule(node, kind)
        if kind in KEPT:
            return None, "unchanged", "keeps the scale"
        weights = {self.nodes[i.node].origin for i in node.inputs}
        slots = self.arguments.scaled(node)
        if kind == "linear" and weights & (self.settings.weights.readouts - self.inner):
            return Step(op="linear_readout", slots=slots), "scaled", "readout: 1/fan_in"
        if kind in PRODUCTS:
            return Step(op=op.name, slots=slots), "scaled", ""
        if kind in RECURRENT:
            settings = (("weight_factor", False),)
            return Step(op=op.name, slots=slots, settings=settings), "scaled", ""
        scales = op.scales(node.args, node.kwargs, func=node.function)
        weighted = any(self.nodes[i.node].computed for i in node.inputs)
        if len(set(scales.values())) == 1 and not weighted:  # weight factors depend on batch size
            return Step(op=op.name, slots=slots), "scaled", ""
        return Step(slots=slots, output=scales["output"]), "scaled", ""

    def _without_rule(self, node: CallNode, kind: str) -> Decision:
        if kind in NEUTRAL:
            return _NOTHING
        restored = self.arguments.restored(node)
        why = " of a sparse tensor" if is_sparse(node) else ""
        why += "; its weight keeps its own scale" if restored else ""
        return restored, LEFT_ALONE, f"no rule for {node.name}{why}"


Decider = Callable[[_Planner, int, CallNode, str], Decision | None]
"""(planner, index of a call, the call, its kind) -> the decision; None if it does not apply."""

DECIDERS: tuple[Decider, ...] = (
    _Planner._replaced,
    _Planner._inside,
    _Planner._preserved,
    _Planner._distance,
    _Planner._weight,
    _Planner._region,
    _Planner._residual,
    _Planner._outside,
    _Planner._share,
    _Planner._add,
    _Planner._mul,
    _Planner._attention,
    _Planner._by_rule,
)
"""The first that applies to a call decides; their docstrings say what each is for."""
