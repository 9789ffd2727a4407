"""From what a model does to what unit scaling does about it: a `Graph` in, a `Plan` out.

1. An add is *residual* if one term is an ancestor of the other and products lie in between; the
   term that is the ancestor is the skip connection, the other the branch.
2. An op may scale its gradient on its own (constraint None) if its only differentiable input is a
   bridge of the graph: no second path around it carries a gradient that its factor would miss
   (Unit Scaling, section 3: cut edges). Elsewhere its scales are tied. Parameters do not count as
   paths: a tied weight gets the sum of differently scaled gradients, as in the peer libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..core.functional import transformer_residual_scaling_rule
from ..ops import find_op
from .calls import ATTENTION, NEUTRAL, PRODUCTS, TRANSPARENT
from .record import Graph, Key, Node, Slot

__all__ = ["Plan", "Settings", "Step", "make_plan"]


@dataclass(frozen=True)
class Step:
    """What to do at one call. Plain data: it is pickled with the model and read by the compiler.

    op: the row of OPS that computes it, one of `replay.SPECIAL`, or None for the call as it is.
    constraint: as in OPS. factor: tau of a residual add, or the scale of a preserved weight.
    skip: which term of a residual add is the skip connection.
    slots: (slot, forward factor, backward factor) for arguments.
    """

    op: str | None = None
    constraint: str | None = "to_output_scale"
    factor: float = 1.0
    skip: int = 0
    slots: tuple[tuple[Slot, float, float], ...] = ()


@dataclass(frozen=True)
class Row:
    """A line of the report. number: how many calls of the kind came before in the module."""

    path: str
    call: str
    done: str
    why: str = ""
    number: int = 0

    @property
    def left_alone(self) -> bool:
        return self.done == "left alone"


@dataclass
class Plan:
    """The steps of every known call, None for those that stay as they are, and their report.

    inner: readout weights that turn out not to be the last: their output goes on into products or
    residual connections.
    """

    steps: dict[Key, Step | None] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    inner: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Settings:
    """What the planner needs to know about the model's weights and the caller's wishes.

    factors: parameter name -> what its values were divided by. readouts: names of the readout
    weights. preserve: keep the function that the model computes. residual: "fixed" or "umup".
    """

    factors: dict[str, float]
    readouts: frozenset[str]
    replaced: frozenset[str]
    preserve: bool = False
    residual: str = "fixed"


# Branch weights of the automatic transform (Unit Scaling library guide: "tau"): attention branches
# need a much smaller one than feed-forward branches, or training suffers.
TAU_ATTENTION, TAU_FEED_FORWARD = 0.01, 0.5

_SECOND_SLOTS: tuple[Slot, ...] = ((1,), ("other",))


def make_plan(graph: Graph, settings: Settings) -> Plan:
    """The plan for a recorded graph."""
    planner = _Planner(graph, settings)
    plan = Plan(inner=planner.inner)
    for index, node in enumerate(graph.nodes):
        if node.function is None:
            continue
        step, row = planner.decide(index, node)
        if node.key is not None:
            plan.steps[node.key] = step
        if row is not None:
            plan.rows.append(row)
    return plan


class _Planner:
    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.nodes = graph.nodes
        self.settings = settings
        self.consumers = graph.consumers()
        self.ancestors = _ancestors(graph.nodes)
        self.bridges = _bridges(graph.nodes)
        kinds = [node.key[1] if node.key else "" for node in graph.nodes]
        self.products = sum(1 << i for i, kind in enumerate(kinds) if kind in PRODUCTS)
        self.attention = sum(1 << i for i, kind in enumerate(kinds) if kind in ATTENTION)
        self.parameters = _parameter_origins(graph.nodes)
        self.skips: dict[int, tuple[Slot, int, int]] = {}
        for index, kind in enumerate(kinds):
            found = self._skip(index) if kind == "add" and not settings.preserve else None
            if found is not None:
                self.skips[index] = found
        self.inner = self._inner_readouts()
        self.taus = self._taus()
        self.splits: dict[tuple[int, Slot], float] = {}
        for index, tau in self.taus.items():
            self._split(index, tau)

    def _inner_readouts(self) -> frozenset[str]:
        """The readout weights with products or residual adds after them."""
        after = 0  # what products and residual adds depend on, themselves left out
        for index in range(len(self.nodes)):
            if self.products >> index & 1 or index in self.skips:
                after |= self.ancestors[index] & ~(1 << index)
        uses = (i for i in range(len(self.nodes)) if self.products & after & 1 << i)
        weights = {self.parameters[i.node] for use in uses for i in self.nodes[use].inputs}
        return frozenset(w for w in weights if w is not None) & self.settings.readouts

    # Residual connections

    def _skip(self, index: int) -> tuple[Slot, int, int] | None:
        """(slot of the skip term, the node it leaves from, the branch's node) of a residual add."""
        terms = [i for i in self.nodes[index].inputs if self.nodes[i.node].floating]
        if len(terms) != 2:
            return None
        for skip, branch in (terms, terms[::-1]):
            origin = self._origin(skip.node, branch.node)
            if origin is not None and self._region(origin, branch.node) & self.products:
                return skip.slot, origin, branch.node
        return None

    def _origin(self, skip: int, branch: int) -> int | None:
        """Where the skip leaves from: the nearest node up from it that the branch depends on."""
        while not self.ancestors[branch] >> skip & 1:
            node = self.nodes[skip]
            if node.key is None or node.key[1] not in TRANSPARENT or not node.inputs:
                return None
            skip = node.inputs[0].node
        return skip if skip != branch and self.nodes[skip].parameter is None else None

    def _region(self, origin: int, branch: int) -> int:
        return self.ancestors[branch] & ~self.ancestors[origin]

    def _taus(self) -> dict[int, float]:
        """The branch weight of each residual add."""
        if self.settings.residual == "umup":
            rule = transformer_residual_scaling_rule()
            return {add: rule(i, len(self.skips)) for i, add in enumerate(self.skips)}
        return {
            add: TAU_ATTENTION
            if self._region(origin, branch) & self.attention
            else TAU_FEED_FORWARD
            for add, (_, origin, branch) in self.skips.items()
        }

    def _split(self, add: int, tau: float) -> None:
        """Marks what reads the skip inside the branch: the branch's gradient factor goes there."""
        _, origin, branch = self.skips[add]
        factor = tau / (1 + tau**2) ** 0.5
        for reader in self.consumers[origin]:
            if self.ancestors[branch] >> reader & 1:
                for i in self.nodes[reader].inputs:
                    if i.node == origin:
                        place = (reader, i.slot)
                        self.splits[place] = self.splits.get(place, 1.0) * factor

    # One call

    def decide(self, index: int, node: Node) -> tuple[Step | None, Row | None]:
        """The step for a call and its line in the report."""
        splits = tuple((i.slot, 1.0, self.splits.get((index, i.slot), 1.0)) for i in node.inputs)
        splits = tuple(s for s in splits if s[2] != 1.0)
        path, kind, number = node.key or ("", node.name, 0)
        if not node.floating or not self._concerns(node):
            return (Step(slots=splits) if splits else None), None
        step, done, why = self._choose(index, node, kind)
        if splits:
            step = step or Step()
            step = replace(step, slots=_merge(step.slots, splits))
            if node.key is None:
                done, why = "left alone", f"{node.name} reads a skip connection and is unknown"
        return step, Row(path, node.name, done, why, number) if done else None

    def _concerns(self, node: Node) -> bool:
        return node.live or any(self.nodes[i.node].live for i in node.inputs)

    def _choose(self, index: int, node: Node, kind: str) -> tuple[Step | None, str, str]:
        if kind in self.settings.replaced:
            return Step(op="replace"), "replaced", "as asked"
        if self.settings.preserve:
            return self._preserve(node, kind)
        if kind == "add":
            return self._add(index, node)
        assert node.function is not None
        op = find_op(node.function)
        if op is None:
            return self._without_rule(node, kind)
        weights = {self.parameters[i.node] for i in node.inputs}
        if kind == "linear" and weights & (self.settings.readouts - self.inner):
            return Step(op="linear_readout", constraint=None), "scaled", "readout: 1/fan_in"
        constraint = None if self.bridges[index] else "to_output_scale"
        why = "not constrained: on the only path" if constraint is None else ""
        return Step(op=op.name, constraint=constraint), "scaled", why

    def _without_rule(self, node: Node, kind: str) -> tuple[Step | None, str, str]:
        if kind in TRANSPARENT:
            return None, "", ""
        restored = self._restored(node)
        step = Step(slots=restored) if restored else None
        if kind in NEUTRAL and not restored:
            return None, "", ""
        why = f"no rule for {node.name}"
        return step, "left alone", why + ("; its weight keeps its own scale" if restored else "")

    def _restored(self, node: Node) -> tuple[tuple[Slot, float, float], ...]:
        """The weights of a call without a rule, back at the scale they came with."""
        factors = self.settings.factors
        found = ((i.slot, factors.get(self.parameters[i.node] or "", 1.0)) for i in node.inputs)
        return tuple((slot, factor, factor) for slot, factor in found if factor != 1.0)

    def _preserve(self, node: Node, kind: str) -> tuple[Step | None, str, str]:
        """Only what leaves the function alone: weights at their own scale, losses."""
        if kind == "cross_entropy":
            return Step(op=kind), "scaled", "gradient only"
        if kind in TRANSPARENT:
            return None, "", ""
        weights = self._restored(node)
        if not weights:
            return None, "", ""
        factor = weights[0][1]
        if kind in ("linear", "embedding") and len(weights) == 1:
            return Step(op=f"preserved_{kind}", factor=factor), "preserved", f"factor {factor:g}"
        return Step(slots=weights), "preserved", f"weight times {factor:g}"

    # Adds

    def _add(self, index: int, node: Node) -> tuple[Step | None, str, str]:
        if index in self.skips:
            tau, slot = self.taus[index], self.skips[index][0]
            step = Step(op="residual_add", factor=tau, skip=int(slot in _SECOND_SLOTS))
            return step, "scaled", f"residual add, tau {tau:.3g}"
        sources = [self.nodes[i.node] for i in node.inputs]
        if len(sources) < 2:
            return None, "unchanged", "adds a number"
        if any(source.masking for source in sources):
            return None, "unchanged", "adds a mask"
        if not all(source.live for source in sources):
            return None, "unchanged", "adds a constant"
        small = [self.parameters[i.node] for i in node.inputs]
        if any(p is not None and p not in self.settings.factors for p in small):
            return None, "unchanged", "adds a bias"
        return Step(op="add"), "scaled", ""


def _merge(
    ours: tuple[tuple[Slot, float, float], ...], more: tuple[tuple[Slot, float, float], ...]
) -> tuple[tuple[Slot, float, float], ...]:
    factors = {slot: (fwd, bwd) for slot, fwd, bwd in ours}
    for slot, fwd, bwd in more:
        f, b = factors.get(slot, (1.0, 1.0))
        factors[slot] = (f * fwd, b * bwd)
    return tuple((slot, fwd, bwd) for slot, (fwd, bwd) in factors.items())


def _ancestors(nodes: list[Node]) -> list[int]:
    """For each node the set of nodes it depends on, itself included, as the bits of a number."""
    found: list[int] = []
    for index, node in enumerate(nodes):
        bits = 1 << index
        for i in node.inputs:
            bits |= found[i.node]
        found.append(bits)
    return found


def _parameter_origins(nodes: list[Node]) -> list[str | None]:
    """For each node the parameter that it is, or that it is a view or copy of."""
    origins: list[str | None] = []
    for node in nodes:
        moved = node.key is not None and node.key[1] in TRANSPARENT and node.inputs
        origins.append(origins[node.inputs[0].node] if moved else node.parameter)
    return origins


def _bridges(nodes: list[Node]) -> list[bool]:
    """For each node, whether its one differentiable input is a bridge (Tarjan's algorithm)."""
    edges: list[tuple[int, int]] = []
    around: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for i in node.inputs:
            source = nodes[i.node]
            if node.live and source.live and source.parameter is None:
                around[index].append(len(edges))
                around[i.node].append(len(edges))
                edges.append((i.node, index))
    bridge = _bridge_edges(len(nodes), edges, around)
    alone = [[e for e in around[i] if edges[e][1] == i] for i in range(len(nodes))]
    return [len(own) == 1 and bridge[own[0]] for own in alone]


def _bridge_edges(count: int, edges: list[tuple[int, int]], around: list[list[int]]) -> list[bool]:
    order, low = [-1] * count, [0] * count
    bridge = [False] * len(edges)
    clock = 0
    for root in range(count):
        stack: list[tuple[int, int, Any]] = []
        if order[root] < 0:
            order[root] = low[root] = clock
            clock += 1
            stack.append((root, -1, iter(around[root])))
        while stack:
            node, entered, rest = stack[-1]
            for edge in rest:
                other = edges[edge][0] + edges[edge][1] - node
                if edge == entered:
                    continue
                if order[other] < 0:
                    order[other] = low[other] = clock
                    clock += 1
                    stack.append((other, edge, iter(around[other])))
                    break
                low[node] = min(low[node], order[other])
            else:
                stack.pop()
                if stack:
                    parent = stack[-1][0]
                    low[parent] = min(low[parent], low[node])
                    bridge[entered] = low[node] > order[parent]
    return bridge
