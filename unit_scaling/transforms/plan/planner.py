"""The planner: decides what is done at each recorded call.

A product of values and a weight has the factor of the rule of its op, a residual add has weights
for its terms, and every other call runs torch's own function.

An add is *residual* if one term is an ancestor of the other with a layer in between, a product with
a weight of RMS 1. The ancestor is the skip connection, the other term the branch. Branches with the
same origin are found one by one (``x + f(x) + g(x)``) or, already summed (``f(x) + g(x) + x``), as
one. Updates of a state by products of values alone (the delta rule), and sums in a loop over the
layer (a recurrence, the steps of a solver), have the coefficients of their formula.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8.common.report import LEFT_ALONE

from ...core.functional import completep_residual_scaling_rule
from ...parameter import Tags
from ...rules.table import Op, find_op
from ..record.calls import CallNode, Input, Slot
from ..record.kinds import (
    EMBEDDINGS,
    GAINS,
    JOINS,
    NORMS,
    PRODUCTS,
    RECURRENT,
    STEPPED,
    TRANSPARENT,
    is_added,
)
from ..record.place import Place
from ..record.values import is_strided, rms_of
from .plan import CallRow, ModelPlan, Step, Steps
from .weights import scaled

Decision = tuple[Step | None, str, str]
"""(step, what the report says was done or "" for no row, why)."""


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
    """Decides on recorded calls. plan: what earlier recordings have decided. tags: of parameters.
    outputs: the nodes of what the whole model returns, none for a part. replaced: the kinds of the
    functions that the caller replaces. changed: the parameters that the model changes itself when
    it runs. kept: the weights that keep their values. inner: the readouts that feed products or
    residual adds."""

    nodes: list[CallNode]
    plan: ModelPlan
    tags: Mapping[str, Tags]
    outputs: Collection[int] = ()
    replaced: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.scaled = scaled(self.tags)
        self.readouts = frozenset(n for n, t in self.tags.items() if t.mup_type == "output")
        self.flow = Flow(self.nodes)
        self.loops = self._loops()
        self.residuals = _find_residuals(self.flow, self.branches())
        self.kept = self._kept()
        self.inner = self._inner_readouts()

    def branches(self) -> list[Branch]:
        """The residual branches, in the order of their adds."""
        layers = filter(self._is_layer, range(len(self.nodes)))
        once = {index for index in layers if self.nodes[index].place not in self.loops}
        return _find_branches(self.flow, once)

    def _is_layer(self, index: int) -> bool:
        """Whether a call is a product of values and a weight that was divided by its RMS."""
        return self.flow.is_product(index) and bool(self._scaled(self.nodes[index]))

    def decided(self) -> tuple[dict[int, Step | None], list[CallRow]]:
        """The steps by the index of the call, and the rows of the report."""
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
        return steps, rows

    def _loops(self) -> frozenset[Place | None]:
        """The places of products of values that an earlier call at the place has made."""
        calls: dict[Place | None, list[int]] = defaultdict(list)
        for index in filter(self._is_layer, range(len(self.nodes))):
            calls[self.nodes[index].place].append(index)
        before = self.flow.before
        return frozenset(p for p, at in calls.items() if len(at) > 1 and at[0] in before(at[-1:]))

    def _kept(self) -> frozenset[str]:
        """The weights that keep their values: those that a call reads of which `_is_weight` is
        false, those that no call reads, and tables whose rows are `_as_given`."""
        weights: set[str] = set()
        values: set[str] = self._as_given() | self.changed
        gains = {name for name in self.scaled if self.tags[name].mup_type == "norm"}
        for index, i, origin in self._reads():
            (weights if self._is_weight(index, i.slot, origin in gains) else values).add(origin)
        return self.scaled.difference(self.plan.tags, weights - values)

    def _reads(self) -> Iterator[tuple[int, Input, str]]:
        """The arguments that are parameters, or moved ones: (index of the call, argument, name)."""
        for index, node in enumerate(self.nodes):
            for i in node.inputs:
                origin = self.nodes[i.node].value.origin
                moves = node.kind in TRANSPARENT and not (node.inside and i.slot == (0,))
                if origin is not None and not moves:
                    yield index, i, origin

    def added(self) -> dict[str, float]:
        """Those of the kept weights that calls only add to values or put beside them (positions, a
        class token), with the RMS of these values."""
        sizes: dict[str, list[float]] = defaultdict(list)
        others = {*self.changed}
        for index, i, origin in self._reads():
            node, values = self.nodes[index], self.flow.values(index)
            joins = node.kind in JOINS or is_added(node.kind, i.slot)
            if joins and values and not node.inside:
                sizes[origin] += [rms_of(node.tensors[v.slot]) for v in values]
            else:
                others.add(origin)
        return {n: max(s) for n, s in sizes.items() if n in self.kept and n not in others}

    def _as_given(self) -> set[str]:
        """The tables whose rows, by their sizes, make what the model returns: by formulas, without
        a product with a weight, a norm or a residual add, which bring values to RMS 1. Results
        that other calls read (hidden states) do not count."""
        ends = {i for i in self.outputs if not self.flow.readers[i]}
        formulas = {i for i in ends if not self._normalizes(i)}
        reached = _reached(formulas, lambda i: () if self._normalizes(i) else self.flow.sources[i])
        tables = [self.nodes[i] for i in reached - ends if self.nodes[i].kind in EMBEDDINGS]
        origins = {self.nodes[i.node].value.origin for table in tables for i in table.inputs}
        return {name for name in origins if name is not None}

    def _normalizes(self, index: int) -> bool:
        node = self.nodes[index]
        return node.kind in NORMS or index in self.residuals or self._is_layer(index)

    def _is_weight(self, index: int, slot: Slot, gain: bool) -> bool:
        """Whether a call multiplies values by a gain, or reads the argument in ``slot`` as the
        weight of a product or a table."""
        node = self.nodes[index]
        if node.inside:
            return False
        if gain and node.kind in GAINS and self.flow.values(index):
            return True
        if node.written or find_op(node.function) is None:
            return False
        product = self.flow.is_product(index) and not is_added(node.kind, slot)
        return product or node.kind in EMBEDDINGS

    def _inner_readouts(self) -> frozenset[str]:
        products = set(filter(self.flow.is_product, range(len(self.nodes))))
        mixes = products & self.flow.before(products.union(self.residuals))
        inner = (i.node for index in mixes for i in self.nodes[index].inputs)
        return self.readouts.intersection(self.nodes[index].value.origin for index in inner)

    def _scaled(self, node: CallNode) -> frozenset[str]:
        """The scaled weights among the arguments that a call does not add."""
        factors = (i.node for i in node.inputs if not is_added(node.kind, i.slot))
        return self.scaled.intersection(self.nodes[i].value.origin for i in factors)

    def _decide(self, index: int, node: CallNode) -> Decision:
        if not (node.value.floating and any(self.nodes[i.node].value.live for i in node.inputs)):
            return _NOTHING
        if node.kind in self.replaced:
            return Step(op="replace", writes=(0,) in node.written), "replaced", "as asked"
        if node.inside:
            before = self.nodes[index - 1]
            same = (before.inside, before.path) == (node.inside, node.path)
            done = "" if before.value.live and same else LEFT_ALONE
            return None, done, f"inside {node.inside}, as all its calls"
        if index in self.residuals:
            return self.residuals[index]
        weights = self._scaled(node) - self.kept
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
        if not all(map(is_strided, node.tensors.values())):
            return None, LEFT_ALONE, f"no rule for {node.name} of a sparse tensor"
        step = step_by_rule(op, node.function, node.args, node.kwargs)
        if op.name == "linear" and weights & (self.readouts - self.inner):
            return replace(step, factor=step.factor**2), "scaled", "readout: 1/fan_in"
        return step, "scaled", ""


def step_by_rule(op: Op, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """The step of a product or a recurrent layer, which has its factors inside."""
    if op.name in RECURRENT:
        return Step(op=op.name)
    scales = op.scales(args, kwargs, func=function)
    return Step(op=op.name, factor=scales["output"], names=tuple(scales))


# Data flow


def _reached(starts: Iterable[int], next: Callable[[int], Iterable[int]]) -> set[int]:
    """All nodes reachable from ``starts`` along ``next``, including ``starts``."""
    reached = set(starts)
    todo = list(reached)
    while todo:
        new = set(next(todo.pop())) - reached
        reached |= new
        todo += new
    return reached


class Flow:
    """The value graph of a recorded run. Nodes are indices, in topological order. A tensor computed
    from parameters alone (a tied, masked or normalised weight) is a weight, not a value."""

    def __init__(self, nodes: list[CallNode]) -> None:
        self.nodes = nodes
        self.sources = [self._sources(node) for node in self.nodes]
        self.readers: list[list[int]] = [[] for _ in self.nodes]
        for index, sources in enumerate(self.sources):
            for source in sources:
                self.readers[source].append(index)

    def _sources(self, node: CallNode) -> list[int]:
        if not node.value.live or node.value.computed:
            return []
        inputs = dict.fromkeys(i.node for i in node.inputs)
        return [i for i in inputs if self.nodes[i].value.live and not self.nodes[i].value.computed]

    def values(self, index: int) -> list[Input]:
        return [i for i in self.nodes[index].inputs if i.node in self.sources[index]]

    def is_product(self, index: int) -> bool:
        return self.nodes[index].kind in PRODUCTS | RECURRENT and self.nodes[index].value.live

    def before(self, ends: Iterable[int]) -> set[int]:
        """The nodes whose results feed one of the calls ``ends``."""
        return _reached([s for end in ends for s in self.sources[end]], self.sources.__getitem__)

    def between(self, start: int, end: int) -> list[int]:
        """The nodes on all paths from ``start`` (excluded) to ``end``, in order."""
        above = _reached([end], lambda index: [s for s in self.sources[index] if s >= start])
        if start not in above or start == end:
            return []
        below = {start}
        for index in sorted(above):
            if not below.isdisjoint(self.sources[index]):
                below.add(index)
        return sorted(below - {start})


# Residual connections


@dataclass
class Branch:
    """A residual branch. add: the call that adds it. skip, end: the arguments of the add. number,
    count: its index in its stream, and their number."""

    add: int
    skip: Input
    end: Input
    origin: int
    number: int = 0
    count: int = 1


def _find_branches(flow: Flow, layers: set[int]) -> list[Branch]:
    """The residual branches of a model. layers: the products with weights of RMS 1."""
    adds: dict[int, Branch] = {}
    for index, node in enumerate(flow.nodes):
        suitable = node.kind == "add" and not node.inside
        if suitable and (branch := _branch(flow, layers, adds, index)) is not None:
            adds[index] = branch
    for index, (number, count) in _places(flow, adds).items():
        adds[index].number, adds[index].count = number, count
    return list(adds.values())


def _find_residuals(flow: Flow, branches: list[Branch]) -> dict[int, Decision]:
    """The decision for each residual add of a model."""
    decisions: dict[int, Decision] = {}
    for branch in branches:
        tau = completep_residual_scaling_rule()(branch.number, branch.count)
        norm = (1 + tau**2) ** 0.5
        weights = {branch.skip.slot: 1 / norm, branch.end.slot: tau / norm}
        node = flow.nodes[branch.add]
        terms = tuple(weights[i.slot] for i in node.inputs if i.slot in weights)
        step = Step(terms=terms, writes=(0,) in node.written)
        decisions[branch.add] = step, "scaled", f"residual add, tau {tau:.3g}"
    return decisions


def _branch(flow: Flow, layers: set[int], adds: dict[int, Branch], index: int) -> Branch | None:
    terms = flow.values(index)
    if len(terms) != 2:
        return None
    for skip, end in (terms, terms[::-1]):
        if flow.nodes[skip.node].value.numel != flow.nodes[index].value.numel:
            continue  # broadcast over positions: a shift
        origin, region = _origin(flow, adds, skip.node, end.node)
        if not layers.isdisjoint(region):
            return Branch(index, skip, end, origin)
    return None


def _origin(flow: Flow, adds: dict[int, Branch], skip: int, end: int) -> tuple[int, list[int]]:
    """(origin of the branch, nodes of the branch); the origin is the nearest common ancestor."""
    at = skip
    while not (region := flow.between(at, end)):
        sources = flow.sources[at]
        if at in adds:  # x + f(x) + g(x): the second branch has the origin of the first
            at = adds[at].origin
        elif flow.nodes[at].kind in TRANSPARENT and len(sources) == 1:
            at = sources[0]
        else:
            return skip, []
    return at, region


def _places(flow: Flow, adds: dict[int, Branch]) -> dict[int, tuple[int, int]]:
    """For each residual add, its index in its stream and the number of adds in the stream."""
    found: dict[int, tuple[int, int]] = {}  # (the first add of the stream, index in it)
    for index, branch in adds.items():
        before: int | None = branch.skip.node
        while before is not None and before not in found:
            alone = len(flow.sources[before]) == 1 and not flow.is_product(before)
            before = flow.sources[before][0] if alone else None
        first, number = (index, -1) if before is None else found[before]
        found[index] = first, number + 1
    counts = {first: number + 1 for first, number in sorted(found.values())}
    return {index: (number, counts[first]) for index, (first, number) in found.items()}
