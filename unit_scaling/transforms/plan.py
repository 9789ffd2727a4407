"""From what a model does to what unit scaling does about it: a `Graph` in, a `Plan` out.

1. Formulas that are spelled out call by call are *units* (`transforms.units`): nothing in them is
   scaled but their result.
2. Residual adds (`transforms.residuals`) weigh their branches; every other add of values is a sum
   of independent terms.
3. An op may scale its gradient on its own (constraint None) if its differentiable inputs are
   bridges of the graph: no second path around them carries a gradient that its factor would miss
   (Unit Scaling, section 3: cut edges). Elsewhere its scales are tied. Parameters do not count as
   paths: a tied weight gets the sum of differently scaled gradients, as in the peer libraries.
4. A number that multiplies a value is taken out: the op before it has made the scale 1 already.
5. Statistics that are taken off an input (`transforms.given`) keep their values.
6. Formulas of matrices (`transforms.matrices`) keep their values; their results are scaled.
7. What comes after the last product and has a range (a probability, a cosine) keeps its values.
8. A parameter that is repeated over positions (a bias, a gain) collects a gradient from each.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..ops import find_op
from .agreement import Agreement
from .arguments import Arguments
from .attention import Attention
from .calls import AVERAGES, EXTREMES, KEPT, NEUTRAL, PRODUCTS, SELECTIONS, TRANSPARENT
from .carried import Carried
from .collected import Collected, fixed_calls
from .flow import Flow
from .given import given_calls
from .growth import gradient_factors
from .loss import Loss
from .matrices import Matrices
from .record import DISTRIBUTION, Graph, Node, is_sparse
from .residuals import Residuals, find_residuals
from .results import KEEPS, Results
from .selecting import DISTANCE, consumers, distances, one_hot
from .steps import Decision, Plan, Row, Settings, Step, with_slots
from .sums import summed
from .units import Unit, find_units
from .unread import unread_parts

__all__ = ["make_plan"]

_NOTHING: Decision = (None, "", "")

_DATA = "on what the model is called with"


def make_plan(graph: Graph, settings: Settings) -> Plan:
    """The plan for a recorded graph."""
    planner = _Planner(graph, settings)
    depths = planner.residuals.depths if settings.residual == "umup" else {}
    plan = Plan(inner=planner.inner, depths=depths)
    for index, node in enumerate(graph.nodes):
        if node.function is None:
            continue
        step, row = planner.decide(index, node)
        if node.key is not None:
            plan.steps[node.key] = step
        if row is not None:
            plan.rows.append(row)
    return plan


def _has_rule(node: Node) -> bool:
    return find_op(node.function) is not None


class _Planner:
    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.settings = settings
        self.nodes = graph.nodes
        self.flow = flow = Flow(graph)
        self.units: dict[int, Unit] = {}
        self.residuals = Residuals()
        self.matrices = Matrices(flow, settings.weights.factors, settings.settled.units)
        if not settings.preserve:
            self.units = find_units(flow, _has_rule, settings.settled.units)
            self.residuals = find_residuals(flow, settings.residual, self.matrices.calls)
        self.carried = Carried(flow, self.residuals.adds, settings.settled.carried)
        self.units = self.matrices.spared(self.carried.spared(self.units))
        self.results = Results(flow, self.residuals.adds, settings.whole)
        met = self.results.meant.met
        self.given = given_calls(flow, self.units.values(), met) if settings.whole else set()
        self.units = {i: u for i, u in self.units.items() if self.given.isdisjoint(u.calls)}
        units = [unit.calls for unit in self.units.values()]
        closed = [d and not w for d, w in zip(flow.data, flow.wanted(), strict=True)]
        self.loss = Loss(flow, self.results)
        self.bridges = self.loss.without(flow.bridges(units, closed))
        self.unread = unread_parts(flow, self.bridges, self.residuals)
        self.agreement = Agreement(flow, self.residuals, self.units, self.bridges)
        fixed = fixed_calls(flow, self.carried, self.results, self.loss, settings.preserve)
        self.collected = Collected(self.agreement, fixed | self.given | self.matrices.calls)
        self.regained = gradient_factors(flow, self.bridges, self.residuals)
        self.within = {call for unit in self.units.values() for call in unit.calls}
        self.inner = self._inner_readouts(flow.bridges(units, flow.data))
        self.arguments = Arguments(flow, settings)
        self.attention = Attention(flow, settings)
        self.special = {
            "add": self._add,
            "sub": self._add,
            "mul": self._mul,
            "div": self._mul,
            "cat": self._cat,
            "grouped_mm": self._grouped_mm,
        }
        self.consumers = consumers(graph)
        self.distances = distances(self.consumers)

    def _inner_readouts(self, bridges: list[bool]) -> frozenset[str]:
        """The readout weights with products, residual adds or a second path to the loss around."""
        inner: set[str | None] = set()
        for index in range(len(self.nodes)):
            if self.flow.is_product(index) and (self.results.mixes[index] or not bridges[index]):
                inner |= {self.flow.parameters[i.node] for i in self.nodes[index].inputs}
        return (
            frozenset(name for name in inner if name is not None) & self.settings.weights.readouts
        )

    def decide(self, index: int, node: Node) -> tuple[Step | None, Row | None]:
        """The step for a call and its line in the report."""
        splits = [
            (i.slot, 1.0, self.residuals.splits.get((index, i.slot), 1.0)) for i in node.inputs
        ]
        splits = [s for s in splits if s[2] != 1.0]
        kind, number = node.key[1:] if node.key is not None else (node.name, 0)
        concerns = node.floating and any(self.nodes[i.node].live for i in node.inputs)
        step, done, why = self._choose(index, node, kind) if concerns else _NOTHING
        if done == "left alone" and node.where:
            why = f"{why} ({node.where})"
        if index in self.regained:
            step, factor = step or Step(), self.regained[index]
            step = replace(step, output=(step.output[0], step.output[1] * factor))
            done = done or "scaled"
            why = f"{why}{', ' if why else ''}gradient divided by {1 / factor:.3g} for batch norms"
        own, because = self.agreement.own(index) if done == "scaled" else ((), "")
        if own:
            step, why = replace(step or Step(), own=own), f"{why}{', ' if why else ''}{because}"
        if index in self.collected:
            step, because = self.collected.added(index, step)
            done, why = done or "scaled", f"{why}{', ' if why else ''}{because}"
        if splits:
            step = with_slots(step, splits)
            if node.key is None:
                done, why = "left alone", f"{node.name} reads a skip connection and is unknown"
        return step, Row(node.path, node.name, done, why, number) if done else None

    def _choose(self, index: int, node: Node, kind: str) -> Decision:
        replaced = Step(op="replace") if kind in self.settings.replaced else None
        if index in self.loss:
            return self.loss.decide(index, replaced or self.arguments.restored(node))
        if replaced is not None:
            return replaced, "replaced", "as asked"
        if node.inside:
            done = "unchanged" if node.inside == DISTRIBUTION else "left alone"
            done = "" if node.continues(self.nodes[index - 1]) else done
            return self.arguments.restored(node), done, f"inside {node.inside}, as all its calls"
        if self.settings.preserve:
            return self._preserve(node, kind)
        if index in self.distances:
            return None, "unchanged", DISTANCE
        if node.computed:
            return self._weight(node, kind)
        if index in self.matrices and index not in self.results.terms:
            return self.matrices.decide(index, self.arguments.restored(node))
        if index in self.carried and index not in self.results.terms:
            return self.carried.decide(index, self.arguments.restored(node))
        if index in self.results.meant.calls and kind not in TRANSPARENT:
            shares = self.arguments.shares(node)
            return self.results.meant.decide(index, self.bridges[index], shares)
        if index in self.given and kind not in NEUTRAL:
            return None, "unchanged", _DATA
        if index in self.within:
            return self._unit(index, node)
        if index in self.residuals.adds:
            slots, why = self.residuals.adds[index]
            return Step(slots=slots), "scaled", why
        kept = self.results.decide(index, self.bridges[index], self.arguments.shares(node))
        if kept is not None:
            return kept
        average = self.agreement.average(index)
        sums = summed(self.flow, index, self.bridges[index], average, self.collected.weights)
        if sums is not None:
            return sums
        special = self.special.get(kind, self.attention.decide)
        return special(index, node) or self._by_rule(index, node, kind)

    # The kinds of calls

    def _weight(self, node: Node, kind: str) -> Decision:
        """A call that computes a weight from parameters."""
        (first, *_) = node.inputs
        if kind in TRANSPARENT:
            share = first.numel / (node.numel or 1)
            return (Step(slots=((first.slot, 1.0, share**0.5),)), "", "") if share < 1 else _NOTHING
        step = self.arguments.restored(node)
        return step, "unchanged" if step else "", "computes a weight, from parameters as they were"

    def _unit(self, index: int, node: Node) -> Decision:
        unit = self.units.get(index)
        step = with_slots(None, self.arguments.shares(node))
        if unit is None:
            return step, "", ""
        calls = f"{len(unit.calls)} calls" if len(unit.calls) > 1 else "one call"
        free = unit.name == "formula" or index in self.results.meant.directions
        bridge = self.bridges[index] and free
        input = unit.input if bridge else unit.output
        output, why = (unit.output, input), f"factor {unit.output:.3g}"
        if self.results.is_ranged(unit.calls):
            output, why = (1.0, input if bridge else 1.0), KEEPS
        return replace(step or Step(), output=output), "scaled", f"{unit.name} of {calls}, {why}"

    def _add(self, index: int, node: Node) -> Decision | None:
        sources = [self.nodes[i.node] for i in node.inputs]
        shares = with_slots(None, self.arguments.shares(node))
        if len(sources) < 2:
            return shares, "unchanged", "adds a number"
        if node.numel == 1:
            return shares, "unchanged", "adds single numbers"
        if any(source.masking for source in sources):
            return shares, "unchanged", "adds a mask"
        if not all(source.live for source in sources):
            return shares, "unchanged", "adds a constant"
        if self.flow.data[index]:
            return None, "unchanged", _DATA
        if set(self.consumers[index].values()) == {"detach"}:
            return shares, "unchanged", "is detached: the rest of a straight-through gradient"
        weights = [self.flow.parameters[i.node] for i in node.inputs if self.nodes[i.node].computed]
        if weights and not any(name in self.settings.weights.factors for name in weights):
            return shares, "unchanged", "adds a bias"
        if node.kind != "add":
            return None
        if self.bridges[index]:  # the op's own factors know of what is repeated
            return Step(op="add", constraint=None), "scaled", "not constrained: on the only path"
        return replace(shares or Step(), op="add"), "scaled", ""

    def _mul(self, index: int, node: Node) -> Decision | None:
        if self.flow.inverts(index):
            return None
        if self.flow.data[index]:
            return None, "unchanged", _DATA
        if index in self.loss.above:
            return None, "unchanged", "in a loss of several parts"
        values = self.flow.sources[index]
        numbers = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, int | float)]
        others = [self.nodes[i.node] for i in node.inputs if i.node not in values]
        if len(values) == 1 and node.numel > 1 and not any(o.live or o.numel > 1 for o in others):
            sign = math.copysign(1.0, numbers[0]) if numbers else 1.0
            return Step(op="times", factor=sign), "scaled", "a number, taken out"
        if len(values) == 1 and any(o.computed for o in others):
            return self._gain(node)
        if len(values) == 1 and not any(o.live for o in others):
            return None, "unchanged", "times a constant"
        if node.kind == "mul" and find_op(node.function) is None:
            return None, "unchanged", "the product of two values"
        return None

    def _gain(self, node: Node) -> Decision:
        """A value times what is computed from parameters: a gain of RMS 1 at first."""
        gains = [(i.slot, self.nodes[i.node]) for i in node.inputs if self.nodes[i.node].computed]
        slots = [(slot, 1 / gain.rms, 1 / gain.rms) for slot, gain in gains if not gain.parameter]
        why = "".join(f", divided by {1 / fwd:.3g}" for _, fwd, _ in slots if abs(fwd - 1) > 0.1)
        slots = [s for s in slots if abs(s[1] - 1) > 0.1]
        step = with_slots(None, [*self.arguments.shares(node), *slots])
        return step, "scaled", f"a gain{why}"

    def _cat(self, index: int, node: Node) -> Decision | None:
        step = with_slots(None, self.unread.get(index, []))
        why = "gradient only: of what is not read at the end"
        return None if step is None else (step, "scaled", why)

    def _grouped_mm(self, index: int, node: Node) -> Decision:
        return Step(op="grouped_mm"), "scaled", ""

    def _by_rule(self, index: int, node: Node, kind: str) -> Decision:
        assert node.function is not None
        op = find_op(node.function)
        if op is None or is_sparse(node):
            return self._without_rule(index, node, kind)
        if kind in KEPT:
            return None, "unchanged", "keeps the scale"
        weights = {self.flow.parameters[i.node] for i in node.inputs}
        slots = (*self.arguments.scaled(node), *one_hot(self.flow, node))
        looked_up = kind in PRODUCTS and not self.flow.sources[index]  # only weights get a gradient
        constraint = None if self.bridges[index] or looked_up else "to_output_scale"
        if kind == "linear" and weights & (self.settings.weights.readouts - self.inner):
            step = Step(op="linear_readout", constraint=constraint, slots=slots)
            return step, "scaled", "readout: 1/fan_in"
        why = "not constrained: on the only path" if constraint is None else ""
        return Step(op=op.name, constraint=constraint, slots=slots), "scaled", why

    def _without_rule(self, index: int, node: Node, kind: str) -> Decision:
        if kind in TRANSPARENT:
            return self._selection(node)
        if kind in EXTREMES and self.bridges[index] and len(node.inputs) == 1:
            return self._extreme(node)
        if kind in NEUTRAL:
            return with_slots(None, self.arguments.shares(node)), "", ""
        if self.flow.data[index]:
            return None, "unchanged", _DATA
        restored = self.arguments.restored(node)
        why = " of a sparse tensor" if is_sparse(node) else ""
        why += "; its weight keeps its own scale" if restored else ""
        return restored, "left alone", f"no rule for {node.name}{why}"

    def _selection(self, node: Node) -> Decision:
        """A part of a value of which only parts are read: the rest of it gets no gradient."""
        whole = node.inputs[0]
        readers = self.flow.readers[whole.node]
        share = sum(self._read(reader) for reader in readers) / (whole.numel or 1)
        parts = all(self.nodes[reader].kind in SELECTIONS for reader in readers)
        if not (parts and 0 < share <= 0.5 and self.flow.is_waist(whole.node)):
            return _NOTHING
        step = Step(slots=((whole.slot, 1.0, share**-0.5),))
        return step, "scaled", f"gradient only: takes 1 in {1 / share:.3g}"

    def _extreme(self, node: Node) -> Decision:
        """The largest of many: the others get no gradient."""
        count = node.inputs[0].numel / (node.numel or 1)
        if count <= 1:
            return _NOTHING
        step = Step(slots=((node.inputs[0].slot, 1.0, count**0.5),))
        return step, "scaled", f"gradient only: takes 1 in {count:.3g}"

    def _read(self, index: int) -> int:
        """How many numbers of a value a call hands on, or their averages, where a constraint keeps
        those from making up for the share of the gradient that each number gets.
        """
        if len(self.flow.readers[index]) == 1:
            (reader,) = self.flow.readers[index]
            if self.nodes[reader].kind in AVERAGES and not self.bridges[reader]:
                return self.nodes[reader].numel
        return self.nodes[index].numel

    def _preserve(self, node: Node, kind: str) -> Decision:
        """Only what leaves the function alone: the casts of weights, losses."""
        if kind == "cross_entropy":
            return Step(op=kind), "scaled", "gradient only"
        static = self.arguments.static(node) if kind in PRODUCTS else ()
        if not static:
            return _NOTHING
        scales = ", ".join(f"{2.0**exponent:g}" for _, exponent in static)
        return Step(static=static), "preserved", f"static scale {scales}"
