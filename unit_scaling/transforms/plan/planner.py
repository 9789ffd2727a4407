"""The planner: turns recorded calls into a `Plan` of scale factors.

The first row of `DECIDERS` that applies to a call decides. What is measured afterwards corrects
factors of results and of operands of products (`measure.measuring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fp8.common.report import LEFT_ALONE

from ...rules.table import find_op
from ..capture import kinds
from ..capture.dataflow import Flow
from ..capture.record import DISTRIBUTION, CallNode, Slot, is_sparse
from ..capture.values import has_scale
from .actions import CallRow, Decision, Plan, Settings, Step
from .arguments import Arguments
from .attention import Attention
from .interior import Interior, cosines, distances, limited
from .patterns import find_units
from .regions import Region, Regions
from .residuals import Residuals, find_residuals
from .weights import SMALL

_NOTHING: Decision = (None, "", "")


@dataclass
class Planned:
    """A plan, the flow it was made from, and what the measurement needs to know about its calls.

    rows: the call of each row of the plan. checked: calls whose factor the measurement may correct.
    unruled: those without a factor of a rule: results of regions. products: those whose operands
    the measurement may give factors to -> the slot of the bias or None. operands: product -> the
    slots of its operands by the names of their scales. settled: calls that use the
    factor of another sequence length, for which their result has RMS 1. small: (call, argument) ->
    log2 of the RMS of a small parameter that nothing makes up for. exponents: of the gauges, once
    they are chosen.
    """

    plan: Plan
    flow: Flow
    settled: set[int]
    rows: list[int] = field(default_factory=list)
    checked: set[int] = field(default_factory=set)
    unruled: set[int] = field(default_factory=set)
    products: dict[int, Slot | None] = field(default_factory=dict)
    operands: dict[int, dict[str, Slot]] = field(default_factory=dict)
    small: dict[tuple[int, Slot], float] = field(default_factory=dict)
    exponents: list[int] = field(default_factory=list)


def make_plan(nodes: list[CallNode], settings: Settings) -> Planned:
    """Returns the plan for recorded calls: the factors of values, with true gradients."""
    planner = _Planner(nodes, settings)
    depths, in_pairs = planner.residuals.depths, not settings.preserve
    plan = Plan(inner=planner.inner, depths=depths, in_pairs=in_pairs)
    found = Planned(plan, planner.flow, planner.attention.of_others)
    for index, node in enumerate(nodes):
        if node.function is None:
            continue
        step, row = planner.decide(index, node)
        if node.key is not None:
            plan.steps[node.key] = step
            if not settings.preserve and _is_multilinear(node):
                found.products[index] = _bias(node)
        found.small |= planner.settle_small(index, node)
        if row is not None:
            plan.rows.append(row)
            found.rows.append(index)
            if planner.is_checked(index, row):
                found.checked.add(index)
    regions = planner.regions
    found.unruled = {i for i in found.checked if i in regions and regions[i].factor is None}
    return found


def _bias(node: CallNode) -> Slot | None:
    """The slot of the bias of a linear layer or convolution."""
    if node.kind not in kinds.LAYERS:
        return None
    return next((i.slot for i in node.inputs if kinds.is_added(node.kind, i.slot)), None)


def _is_multilinear(node: CallNode) -> bool:
    """Whether a call is a product of its tensors, or that and a bias."""
    plain = not (node.inside or node.written or is_sparse(node))
    given = [t for t in node.tensors.values() if has_scale(t)]
    terms = len(given) == 2 + (_bias(node) is not None) or node.kind == "einsum"
    return node.kind in kinds.PRODUCTS - kinds.ATTENTION and plain and terms


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
        self.arguments = Arguments(flow, settings, self.interior.learned)
        self.attention = Attention(flow, settings)
        self.distances = distances(flow)

    def _find_regions(self) -> None:
        """Finds the regions and the residual adds; the last region that holds a call keeps it."""
        flow, settings, interior = self.flow, self.settings, self.interior
        closed = Regions(flow, interior)
        matrices = closed.formulas()
        inside = {call for region in matrices for call in region.calls}
        self.residuals = find_residuals(flow, settings.residual, inside)
        carried = closed.loops(self.residuals.adds, settings.settled.loops)
        inside = inside.union(*(region.calls for region in carried))
        for unit in find_units(flow, settings.settled.units):
            if inside.isdisjoint(unit.calls) and all(last in interior.calls for last in unit.exits):
                self.regions |= dict.fromkeys(unit.calls, unit)
        ends = {last for unit in self.regions.values() for last in unit.exits}
        elementwise = {i for i, node in enumerate(self.nodes) if node.kind in kinds.ELEMENTWISE}
        one_factor = ends | (elementwise - self.regions.keys())
        bounded = limited(flow, interior) & interior.calls & one_factor
        alone = dict.fromkeys(bounded, "value whose logarithm or the like is taken")
        alone |= dict.fromkeys(cosines(flow, interior), "cosine after the last layer")
        self.regions |= {i: Region(frozenset([i]), what) for i, what in alone.items()}
        for region in (*carried, *matrices):
            self.regions |= dict.fromkeys(region.calls, region)

    def _inner_readouts(self) -> frozenset[str]:
        """The readout weights whose output feeds layers or residual adds."""
        products = set(filter(self.flow.is_product, range(len(self.nodes))))
        mixes = products & self.flow.before(products.union(self.residuals.adds))
        inner = [i.node for index in mixes for i in self.nodes[index].inputs]
        return self.settings.weights.readouts & {self.nodes[index].origin for index in inner}

    def is_checked(self, index: int, row: CallRow) -> bool:
        """Whether a measurement may correct the factor of a call."""
        node = self.nodes[index]
        chosen = index in self.residuals.adds or row.why.startswith("readout")
        if chosen or index in self.attention.of_others or row.done not in ("scaled", LEFT_ALONE):
            return False
        replayed = node.key is not None and not node.inside
        return replayed and (index in self.interior.calls or self.flow.is_product(index))

    def settle_small(self, index: int, node: CallNode) -> dict[tuple[int, Slot], float]:
        """Settles that no measurement makes up for a small parameter that keeps its values: it
        learns at the rate of one of RMS 1, so its steps would be too large. As `Planned.small`."""
        found: dict[tuple[int, Slot], float] = {}
        if node.key is None or node.kind not in kinds.PRODUCTS | {"mul"} or node.computed:
            return found
        settings = self.settings
        for i in node.inputs:
            source = self.nodes[i.node]
            kept = source.origin is not None and source.origin not in settings.weights.factors
            if kept and source.rms < SMALL and not kinds.is_added(node.kind, i.slot):
                settings.settled.corrections.setdefault(node.place, 0)
                settings.settled.operands.setdefault((node.key, i.slot), 0)
                found[index, i.slot] = math.log2(source.rms)
        return found

    def decide(self, index: int, node: CallNode) -> tuple[Step | None, CallRow | None]:
        """The step for a call and its row in the report."""
        kind, number = node.key[1:] if node.key is not None else (node.name, 0)
        concerns = node.floating and any(self.nodes[i.node].live for i in node.inputs)
        found = (decider(self, index, node, kind) for decider in DECIDERS)
        step, done, why = next(filter(None, found)) if concerns else _NOTHING
        if done == LEFT_ALONE and node.where:
            why = f"{why} ({node.where})"
        return step, CallRow(node.path, node.name, done, why, number) if done else None

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
        before, done = self.nodes[index - 1], LEFT_ALONE
        place = before.inside, before.path, before.where
        if before.live and place == (node.inside, node.path, node.where):
            done = ""  # the row of the previous call says it
        elif node.inside == DISTRIBUTION:
            done = "unchanged"
        return self.arguments.restored(node), done, f"inside {node.inside}, as all its calls"

    def _preserved(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """With init="preserve", any call: a product has static scales for the casts of weights."""
        if not self.settings.preserve:
            return None
        static = self.arguments.static(node) if kind in kinds.PRODUCTS else ()
        if not static:
            return _NOTHING
        scales = ", ".join(f"{2.0**exponent:g}" for _, exponent in static)
        return Step(static=static), "preserved", f"static scale {scales}"

    def _distance(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A call of a distance whose argmin is taken: keeps its values."""
        if index not in self.distances:
            return None
        return None, "unchanged", "in a distance whose argmin is taken: keeps its values"

    def _weight(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A call that computes a weight from parameters: uses the original values."""
        if not node.computed:
            return None
        if kind in kinds.TRANSPARENT:
            return _NOTHING
        step = self.arguments.restored(node)
        if node.key is None:
            origins = {self.nodes[i.node].origin for i in node.inputs}
            seen = bool(node.written) or origins.isdisjoint(self.settings.weights.unseen)
            done = "" if seen else LEFT_ALONE
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
        named = self.flow.is_product(index) or kind in kinds.ALGEBRA
        named |= not region.exits and index == min(region.calls)
        return step, "unchanged" if named else "", f"in a {region.what}: keeps its values"

    def _residual(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A residual add: the weights of its terms."""
        return self.residuals.adds.get(index)

    def _outside(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A call outside the `interior`: keeps its values, unless it is a layer."""
        if index in self.interior.calls or self.flow.is_layer(index):
            return None
        restored = self.arguments.restored(node)
        if restored is not None and node.key is None:
            return None, LEFT_ALONE, f"no rule for {node.name}, which reads parameters of RMS 1"
        silent = kind in kinds.NEUTRAL and restored is None
        done = "" if silent or find_op(node.function) is None else "unchanged"
        return restored, done, "not between two layers: keeps its values"

    def _share(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A join of values and a much smaller or larger parameter: each keeps its share."""
        slots = () if node.key is None else self.settings.settled.shares.get(node.key)
        if not slots:
            return None
        shares = ", ".join(f"{factor:.2g}" for _, factor, _ in slots)
        return Step(slots=slots), "scaled", f"terms keep their shares, {shares}"

    def _add(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A sum: of values by its rule, of numbers, masks, constants and biases as it is."""
        if kind not in ("add", "sub"):
            return None
        sources = [self.nodes[i.node] for i in node.inputs]
        weights = {source.origin for source in sources if source.computed}
        detached = {self.nodes[i].kind for i in self.flow.consumers[index]} == {"detach"}
        reasons = {
            "adds a number": len(sources) < 2,
            "adds single numbers": node.numel == 1,
            "adds a mask": any(source.masking for source in sources),
            "adds a constant": not all(source.live for source in sources),
            "is detached: the rest of a straight-through gradient": detached,
            "adds a bias": weights and weights.isdisjoint(self.settings.weights.factors),
        }
        for why, applies in reasons.items():
            if applies:
                return None, "unchanged", why
        return (Step(op="add"), "scaled", "") if node.kind == "add" else None

    def _mul(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """A value times or over a number, which is taken out, a constant or a gain."""
        values = self.flow.sources[index]
        if kind not in ("mul", "div") or self.flow.inverts(index) or len(values) != 1:
            return None
        numbers = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, int | float)]
        others = [self.nodes[i.node] for i in node.inputs if i.node not in values]
        if node.numel > 1 and not any(o.live or o.numel > 1 for o in others):
            sign = math.copysign(1.0, numbers[0]) if numbers else 1.0
            return Step(op="times", factor=sign), "scaled", "a number, taken out"
        if any(o.computed for o in others):
            return None, "scaled", "a gain"
        return None if any(o.live for o in others) else (None, "scaled", "times a constant")

    def _attention(self, index: int, node: CallNode, kind: str) -> Decision | None:
        """Attention, and the products and softmax that it is composed of."""
        return self.attention.decide(index, node)

    def _by_rule(self, index: int, node: CallNode, kind: str) -> Decision:
        """Any call: the rule of its op, with the true gradient of the scaled function."""
        assert node.function is not None
        op = find_op(node.function)
        if op is None or is_sparse(node):
            restored = self.arguments.restored(node)
            why = f"no rule for {node.name}" + " of a sparse tensor" * is_sparse(node)
            why += "; its weight keeps its own scale" if restored else ""
            return _NOTHING if kind in kinds.NEUTRAL else (restored, LEFT_ALONE, why)
        if kind in kinds.KEPT:
            return None, "unchanged", "keeps the scale"
        weights = {self.nodes[i.node].origin for i in node.inputs}
        slots = (*self.arguments.computed(node), *self.arguments.one_hot(node))
        if kind == "linear" and weights & (self.settings.weights.readouts - self.inner):
            return Step(op="linear_readout", slots=slots), "scaled", "readout: 1/fan_in"
        if kind in kinds.PRODUCTS | kinds.RECURRENT:
            settings = (("weight_factor", False),) if kind in kinds.RECURRENT else ()
            return Step(op=op.name, slots=slots, settings=settings), "scaled", ""
        scales = op.scales(node.args, node.kwargs, func=node.function)
        weighted = self.flow.reads_weights(index)  # weight factors depend on batch size
        if len(set(scales.values())) == 1 and not weighted:
            return Step(op=op.name, slots=slots), "scaled", ""
        return Step(slots=slots, output=scales["output"]), "scaled", ""


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
