"""Gauges of gradients: a power of two for each region of a model, measured in one step.

docs/gauges.md derives them. A *region* is a connected set of calls without factors. Products and
weighted adds have factors that absorb the ratio of two gauges, so regions end there. A region has
one exponent, chosen to minimise the number of extra factors. A product that it does not suit gets
its own exponent, with factors where it meets the region.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_high

import torch

from ...ops.products import is_bias
from ...rules.table import OPS
from ..capture.dataflow import components, reached
from ..capture.kinds import PRODUCTS, RECURRENT, TRANSPARENT, is_added
from ..capture.record import CallNode, Input, Key, Slot, replaced
from ..capture.values import is_strided
from ..plan.actions import MEASURED, CallRow, Placed, Settled, Step, with_slots
from ..plan.planner import Planned
from ..run.replay import factor_after
from .measuring import REACH, Measured
from .ranks import agreed_once, is_alone

GROWTH = 8
"""Gradients in e5m2, up to 2**15.8, may become so many octaves larger than at the measurement."""


@dataclass
class _Regions:
    """The gauges of a plan, as in `place`. exponents: of the result of each node."""

    planned: Planned
    measured: Measured
    settled: Settled
    true_gradients: bool
    model: str

    def __post_init__(self) -> None:
        self.flow, self.plan = self.planned.flow, self.planned.plan
        self.nodes = self.flow.nodes
        self.edges = [
            (index, i)
            for index, node in enumerate(self.nodes)
            if node.function
            for i in node.inputs
            if node.live and self._has_gradient(i.node)
        ]
        self._readers: dict[int, list[int]] = defaultdict(list)
        for index, i in self.edges:
            self._readers[i.node].append(index)
        self._free = {
            (index, slot) for index in range(len(self.nodes)) for slot in self._riding(index)
        }
        #: Edges that cannot have a factor, and the nodes of these and of edges that are written.
        self._forced: list[tuple[int, Input]] = []
        self._tied: set[int] = set()
        self._region = self._regions()
        self._boundary = self._boundaries()
        self._grows = self._growth()
        self.exponents: list[int] = [0] * len(self.nodes)
        self._shift = self._offset()
        derives = any(node.function is torch.autograd.grad for node in self.nodes)
        if self.settled.twice:
            return
        if not (derives or self.measured.derives):
            self._choose()
        elif not self.true_gradients:
            self.plan.entry = self._one()
            self.exponents = [self.plan.entry] * len(self.nodes)

    def _riding(self, index: int) -> Iterable[Slot]:
        """The slots of a call whose factor is free, or replaces the factor of a parameter."""
        node, step = self.nodes[index], self.plan.step_of(self.nodes[index])
        weighted = [slot for slot, fwd, _ in (step.slots if step else ()) if fwd != 1]
        weights = [i.slot for i in node.inputs if self.nodes[i.node].computed and not node.computed]
        return (*weighted, *weights, *self.planned.operands.get(index, {}).values())

    def _has_gradient(self, index: int) -> bool:
        node = self.nodes[index]
        return node.live and (node.function is not None or self._is_leaf(index))

    def _is_leaf(self, index: int) -> bool:
        """Whether a node is a parameter, or an input that requires a gradient."""
        node = self.nodes[index]
        return node.function is None and (node.parameter is not None or node.wanted)

    def _regions(self) -> list[int]:
        """For each node, the first one of its region: those joined by edges without a factor."""
        near: dict[int, set[int]] = {index: set() for index in range(len(self.nodes))}

        def join(nodes: list[int]) -> None:
            for one, other in pairwise(nodes):
                near[one].add(other)
                near[other].add(one)

        for index, i in self.edges:
            node = self.nodes[index]
            written = self._bases(i.node) if i.slot in node.written else []
            # A replay does not see the call, or an autograd function computes its gradient.
            forced = node.key is None or node.inside or not is_strided(node.tensors[i.slot])
            self._forced += [(index, i)] if forced else []
            if written or forced:
                self._tied.update([index, i.node, *written])
            elif (index, i.slot) in self._free or self._is_leaf(i.node):
                continue
            join([index, *(written or [i.node])])
        calls = [i for i, n in enumerate(self.nodes) if n.live and not self._is_leaf(i)]
        hidden = any(self.nodes[i].function and self.nodes[i].key is None for i in calls)
        if self.settled.varying and hidden:  # results of calls that no replay sees are not tracked
            self._tied.update(calls)
            join(calls)
        firsts = {index: min(part) for part in components(near) for index in part}
        return [firsts[index] for index in near]

    def _bases(self, index: int) -> list[int]:
        """A node and what it is a view of."""
        found = [index]
        while self.nodes[index].kind in TRANSPARENT and self.nodes[index].inputs:
            index = self.nodes[index].inputs[0].node
            found.append(index)
        return found

    def _boundaries(self) -> Counter[int]:
        """For each call, the number of edges that would need a factor if it had its own gauge."""
        edges = [(r, i.node) for r, i in self.edges if (r, i.slot) not in self._free]
        return Counter(n for edge in edges if not self._is_leaf(edge[1]) for n in edge)

    def _growth(self) -> list[float]:
        """For each node, by how many octaves more than `GROWTH` its gradient grows when the small
        parameters learn that it is multiplied by on all of its paths."""
        found: dict[int, float] = {}
        parameters: dict[int, dict[Slot, float]] = defaultdict(dict)
        for (index, slot), size in self.planned.small.items():
            parameters[index][slot] = -size
        for index, i in reversed(self.edges):
            own = sum(size for slot, size in parameters[index].items() if slot != i.slot)
            found[i.node] = min(found.get(i.node, math.inf), found.get(index, 0.0) + own)
        return [max(0.0, found.get(index, 0.0) - GROWTH) for index in range(len(self.nodes))]

    def _wanted(self, index: int) -> float | None:
        """The exponent that brings the gradient of a call to RMS 1; of a product, the gradient that
        its kernels receive."""
        node = self.nodes[index]
        if node.key not in self.measured.gradients:
            return None
        wanted = -self.measured.gradients[node.key] - self._grows[index]
        step = self.plan.step_of(node)
        if step is None or not self.is_product(index):
            return wanted
        return wanted - math.log2(abs(factor_after(step, node.function, node.args, node.kwargs)))

    def _choose(self) -> None:
        members: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            if node.live and not self._is_leaf(index):
                members[self._region[index]].append(index)
        chosen = {region: self._of_region(region, calls) for region, calls in members.items()}
        for index in reversed(range(len(self.nodes))):  # zero gradients: the gauge of their reader
            if chosen.get(self._region[index], 0) is None:
                read = (chosen.get(self._region[r]) for r in self.flow.readers[index])
                chosen[self._region[index]] = next((c for c in read if c is not None), None)
        for region, calls in members.items():
            for index in calls:
                self.exponents[index] = self._own(index, chosen[region] or 0)
        leaves = [index for index in range(len(self.nodes)) if self._is_leaf(index)]
        bound = {i for i in leaves if self._region[i] in chosen or i in self._tied}
        weights = dict(self._biases())
        for index in sorted(leaves, key=weights.__contains__):  # biases after their weights
            near = [weights[index]] if index in weights else self._readers[index]
            region = chosen.get(self._region[index]) or 0
            self.exponents[index] = region if index in bound else self._of_leaf(index, near)
        names = {i: name for i in leaves if i not in bound and (name := self.nodes[i].parameter)}
        known = set(names.values()) if self.true_gradients else self.settled.parameters
        own = {name: self.exponents[i] for i, name in names.items() if name not in known}
        shared = agreed_once(self.model, own)  # the same in all processes
        self.exponents = [shared.get(names.get(i, ""), c) for i, c in enumerate(self.exponents)]

    def _one(self) -> int:
        """The gauge of all tensors, inputs too, of a model that calls `torch.autograd.grad`, whose
        own gradients are true then: in the middle of those of its products."""
        names = [node.parameter for node in self.nodes if node.parameter is not None]
        known = [c for name in names if (c := self.settled.parameters.get(name)) is not None]
        if known:
            return known[0] - (self.plan.outside or 0)
        products = filter(self.is_product, range(len(self.nodes)))
        wanted = [w for index in products if (w := self._wanted(index)) is not None]
        if not wanted:  # inside torch.vmap
            sizes = self.measured.parameters
            wanted = [-sizes[name] for name in names if name in sizes]
        middle = round(median_high(wanted)) if wanted else 0
        shared = agreed_once(self.model, dict.fromkeys(names, middle))
        return next(iter(shared.values()), 0)

    def _biases(self) -> Iterator[tuple[int, int]]:
        """(bias, weight) of products, which apply the factor of their weight to both."""
        for index, names in self.planned.operands.items():
            at = {i.slot: i.node for i in self.nodes[index].inputs}
            if "bias" in names and "weight" in names:
                yield at[names["bias"]], at[names["weight"]]

    def _offset(self) -> int:
        """The offset to gauges of another call signature, whose gradient may begin elsewhere."""
        known, keys = self.settled.gauges, enumerate(node.key for node in self.nodes)
        both = [(i, known[key]) for i, key in keys if key in known]
        moves = [w - gauge for i, gauge in both if (w := self._wanted(i)) is not None]
        return round(median_high(moves)) if moves else 0

    def _of_region(self, region: int, calls: list[int]) -> int | None:
        forced = [i.node for index, i in self._forced if self._region[index] == region]
        if self.true_gradients and any(map(self._is_leaf, forced)):
            return 0
        names, keys = [self.nodes[i].parameter for i in forced], [self.nodes[i].key for i in calls]
        parameters, gauges = self.settled.parameters, self.settled.gauges
        known = [
            parameters[name] - (self.plan.outside or 0) for name in names if name in parameters
        ]
        known += [gauges[key] + self._shift for key in keys if key in gauges]
        if known:
            return known[0]
        found = [(i, w) for i in calls if (w := self._wanted(i)) is not None]
        products = [(i, w) for i, w in found if self.is_product(i)]
        wanted = [(w, self._boundary[i]) for i, w in products or found]
        if not wanted:
            return None
        middle, _ = median_high(wanted)
        candidates = sorted({round(w) for w, _ in wanted}, key=lambda c: (abs(c - middle), c))
        return min(candidates, key=lambda c: sum(n for w, n in wanted if abs(c - w) > REACH))

    def is_product(self, index: int) -> bool:
        return self.nodes[index].kind in PRODUCTS | RECURRENT

    def _own(self, index: int, region: int) -> int:
        """The exponent of a call: that of its region, or its own for a product it does not suit."""
        wanted = self._wanted(index)
        if not self.is_product(index) or index in self._tied or wanted is None:
            return region
        key = self.nodes[index].key
        if key in self.settled.gauges:
            return self.settled.gauges[key] + self._shift
        return region if abs(region - wanted) <= REACH else round(wanted)

    def _of_leaf(self, index: int, near: Iterable[int]) -> int:
        """near: the nodes whose gauge needs no factor for this one."""
        name = self.nodes[index].parameter
        if name is None or self.true_gradients:
            return 0
        if name in self.settled.parameters:
            return self.settled.parameters[name] - (self.plan.outside or 0)
        gauges = [self.exponents[other] for other in near]
        found = self._gradient(index)
        if found is None:
            return gauges[0] if gauges else 0
        found += self._grows[index]
        return next((c for c in gauges if abs(c + found) <= REACH), round(-found))

    def _gradient(self, index: int) -> float | None:
        """log2 of the RMS of a parameter's gradient; None if it is zero, or if only rounding keeps
        it from zero, as that of the bias of keys: a gauge would bring rounding errors to RMS 1."""
        found = self.measured.parameters.get(self.nodes[index].parameter or "")

        def moved(call: int) -> list[int]:
            return self._readers[call] if self.nodes[call].kind in TRANSPARENT else []

        terms = reached(self._readers[index], moved)
        errors = [e for call in terms if (e := self._rounding(call)) is not None]
        if found is None or not errors:
            return found
        norm = found + math.log2(self.nodes[index].numel) / 2
        return None if norm < max(errors) else found

    def _rounding(self, index: int) -> float | None:
        """log2 of the norm of the rounding errors of a call's gradient; None for moves."""
        node = self.nodes[index]
        if node.key not in self.measured.rounding or node.kind in TRANSPARENT:
            return None
        step = self.plan.step_of(node) or Step()
        factor = _factor(step) if index in self.planned.operands else step.output
        return self.measured.rounding[node.key] + math.log2(abs(factor))


def operands(node: CallNode, step: Step | None) -> dict[str, Slot]:
    """The tensor operands of a product, by the names of their scales in its op. Empty if some
    of them are not arguments of the call, but parts of one or reshaped."""
    if step is None or step.op not in OPS or node.kind not in PRODUCTS:
        return {}
    op = OPS[step.op]
    if not op.constrainable:
        return {}
    # One tensor may be two arguments, and those of examples inside torch.vmap are gone: by shape.
    alone = {
        slot: torch.empty(t.shape, dtype=t.dtype, device="meta") for slot, t in node.tensors.items()
    }
    given = op.bind(replaced(node.args, alone), replaced(node.kwargs, alone), node.function)
    if given.get("more"):
        return {}
    slots = {id(t): slot for slot, t in alone.items()}
    names = op.scales(node.args, node.kwargs, func=node.function).keys()
    tensors = {name: t for name in names if isinstance(t := given.get(name), torch.Tensor)}
    if any(id(t) not in slots for t in tensors.values()):
        return {}
    found = {name: slots[id(t)] for name, t in tensors.items()}
    added = next((name for name, slot in found.items() if is_added(node.kind, slot)), "bias")
    if added != "bias" and not is_bias(given[added], given["mat2"]):
        del found[added]  # a term of the sum
    return found


def with_true_gradients(planned: Planned, settled: Settled) -> Planned:
    """Gives the products of a plan the true gradients of the scaled function, and returns it; their
    op rules scale weight gradients independently. A product has the factor of its first plan: that
    of a sum over positions depends on their number."""
    for index, node in enumerate(planned.flow.nodes):
        step = planned.plan.step_of(node)
        names = operands(node, step)
        if node.key is not None and step is not None and step.op is not None and names:
            rule = OPS[step.op].scales(
                node.args, node.kwargs, func=node.function, constraint=step.constraint
            )
            factor = settled.factors.setdefault((node.key, step.op), rule["output"])
            step = replace(step, constraint=tuple((name, factor) for name in ("output", *names)))
            planned.operands[index] = names
            planned.plan.steps[node.key] = _gauged(names, step, {})
    return planned


def place(
    planned: Planned, measured: Measured, settled: Settled, true_gradients: bool, model: str
) -> None:
    """Writes corrections and gauges into a plan. true_gradients: whether parameters must have the
    model's. model: its name in the agreements of processes."""
    plan, nodes = planned.plan, planned.flow.nodes
    for index, node in enumerate(nodes):
        if index in planned.checked:
            plan.corrections[node.place] = measured.corrections.get(node.place, 0)
        exponent = plan.corrections[node.place] if index in planned.checked else 0
        step = plan.step_of(node) or (Step() if exponent else None)
        if node.key is not None and step is not None:
            output = step.output * 2.0**exponent
            plan.steps[node.key] = replace(step, output=output, writes=(0,) in node.written)
    _scale_operands(planned, measured, settled)
    regions = _Regions(planned, measured, settled, true_gradients, model)
    exponents = regions.exponents
    ratios: dict[int, dict[Slot, int]] = defaultdict(dict)
    for index, i in regions.edges:
        if ratio := exponents[i.node] - exponents[index]:
            ratios[index][i.slot] = ratio
    for index, node in enumerate(nodes):
        names = planned.operands.get(index, {})
        if node.key is not None and (index in ratios or names):
            plan.steps[node.key] = _gauged(names, plan.step_of(node), ratios[index])
        if node.key in plan.steps and regions.is_product(index):
            plan.gauges[node.key] = exponents[index]
            if node.key not in measured.gradients:
                plan.unseen += (node.key,)
        if node.parameter is not None:
            plan.parameters[node.parameter] = exponents[index]
            if node.parameter not in measured.parameters and is_alone():
                plan.idle += (node.parameter,)
    planned.exponents.extend(exponents)
    note_places(planned, regions.edges, exponents)
    for number, (row, index) in enumerate(zip(plan.rows, planned.rows, strict=True)):
        correction = plan.corrections[nodes[index].place] if index in planned.checked else 0
        plan.rows[number] = _told(row, nodes[index], exponents[index], correction)


def note_places(
    planned: Planned, edges: Iterable[tuple[int, Input]], exponents: Sequence[int]
) -> None:
    """Writes the calls of a plan and their places, with the gauges of the results ``exponents``.
    edges: (call, argument with a gradient)."""
    plan, sources = planned.plan, defaultdict[int, list[tuple[Slot, int]]](list)
    plan.calls, plan.places = {}, {}
    for index, i in edges:
        sources[index].append((i.slot, exponents[i.node]))
    for index, node in enumerate(planned.flow.nodes):
        if node.key is not None and node.key in plan.steps:
            step, gauge = plan.steps[node.key], exponents[index] if node.live else None
            call = Placed(node.key, step, gauge, tuple(sources[index]), node.written)
            plan.calls[node.key] = call
            plan.places.setdefault(node.place, call)


def _scale_operands(planned: Planned, measured: Measured, settled: Settled) -> None:
    """Brings the operands of products to RMS 1 by powers of two, which the results are divided by.
    The bias is multiplied by all of them, as it is divided with the result."""
    found: dict[Key, dict[Slot, float]] = defaultdict(dict)
    for (key, slot), size in measured.operands.items():
        own = -round(size) if abs(size) > REACH else 0
        exponent = planned.plan.operands[key, slot] = settled.operands.get((key, slot), own)
        if exponent:
            found[key][slot] = 2.0**exponent
    steps = planned.plan.steps
    biases = {planned.flow.nodes[index].key: bias for index, bias in planned.products.items()}
    for key, factors in found.items():
        whole = math.prod(factors.values())
        factors |= {} if (bias := biases[key]) is None else {bias: whole}
        step = with_slots(steps.get(key), [(slot, f, f) for slot, f in factors.items()])
        assert step is not None
        steps[key] = replace(step, output=step.output / whole)


def _gauged(names: dict[str, Slot], step: Step | None, ratios: dict[Slot, int]) -> Step:
    """The step with a power of two for the gradient of each argument. names: as `operands`."""
    if step is not None and names:
        output = _factor(step)
        scales = {name: output * 2.0 ** ratios.pop(slot, 0) for name, slot in names.items()}
        if "bias" in scales:  # the product applies the weight's factor to the bias
            rest = scales["bias"] / scales["weight"]
            scales["bias"] = scales["weight"]
            if rest != 1:
                ratios[names["bias"]] = round(math.log2(rest))
        step = replace(step, output=1.0, constraint=(("output", output), *scales.items()))
    step = with_slots(step, [(slot, 1.0, 2.0**e) for slot, e in ratios.items()])
    return step or Step()


def _factor(step: Step) -> float:
    """The factor of the result of a product whose operands have factors of their own."""
    assert isinstance(step.constraint, tuple)
    return step.output * dict(step.constraint)["output"]


def _told(row: CallRow, node: CallNode, exponent: int, correction: int) -> CallRow:
    """The report row of a call, with the correction of its factor and, for a product, its gauge."""
    said = [row.why] if row.why else []
    if correction:
        said.append(f"measured: times {2.0**correction:g}")
    if node.kind in PRODUCTS | RECURRENT:
        said.append(f"gradient times {2.0**exponent:g}")
    done = MEASURED if correction and row.left_alone else row.done
    return replace(row, done=done, why=", ".join(said))
