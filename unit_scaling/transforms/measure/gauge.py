"""Gauges of gradients: a power of two for each region of a model, measured in one step.

Let the gradient at the output of call v be the true gradient of the scaled function times 2**c(v).
A gradient that propagates from v to u is multiplied by 2**(c(u) - c(v)). The gradient of every
parameter is then the true one times a power of two, for any exponents c. They are chosen such that
all gradients that enter a product have RMS 1.

A *region* is a connected set of calls without factors. Products and weighted adds have factors that
absorb the ratio of two gauges, so regions end there. A region has one exponent, chosen to minimise
the number of extra factors. A product that it does not suit gets its own exponent, with factors
where it meets the region.

The measurements are described in `measure.measuring`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ...ops.products import is_bias
from ...rules.table import OPS
from ..capture.kinds import PRODUCTS, RECURRENT, TRANSPARENT, is_added
from ..capture.record import CallNode, Input, Key, Slot, replaced
from ..capture.values import is_strided
from ..plan.actions import MEASURED, CallRow, Placed, Settled, Step, with_slots
from ..plan.planner import Planned
from ..run.replay import factor_after
from .measuring import REACH, Measured
from .ranks import agreed_once, is_alone

GROWTH = 8
"""Gradients in e5m2, whose largest value is 2**15.8, may become so many octaves larger than at the
measurement.
"""


class _Regions:
    """The gauges of a plan. exponents: of the result of each node."""

    def __init__(
        self,
        planned: Planned,
        measured: Measured,
        settled: Settled,
        true_gradients: bool,
        model: str,
    ) -> None:
        self.flow, self.plan = planned.flow, planned.plan
        self.nodes = planned.flow.nodes
        self._measured, self._settled = measured, settled
        self._true, self._model = true_gradients, model
        self._root = list(range(len(self.nodes)))
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
        self._tied = self._join()
        self._boundary = self._boundaries()
        self._grows = self._growth(planned.small)
        self.exponents: list[int] = [0] * len(self.nodes)
        self._shift = self._offset()
        if settled.twice:
            return
        if not (measured.derives or any(n.function is torch.autograd.grad for n in self.nodes)):
            self._choose()
        elif not true_gradients:
            self.plan.entry = self._one()
            self.exponents = [self.plan.entry] * len(self.nodes)

    def _riding(self, index: int) -> Iterable[Slot]:
        """The slots of a call whose factor is free, or replaces the factor of a parameter."""
        node = self.nodes[index]
        step = None if node.key is None else self.plan.steps.get(node.key)
        weighted = [slot for slot, fwd, _ in (step.slots if step else ()) if fwd != 1]
        weights = [i.slot for i in node.inputs if self.nodes[i.node].computed]
        inner = weights if not node.computed else []
        return (*weighted, *inner, *operands(node, step).values())

    def _has_gradient(self, index: int) -> bool:
        return self.nodes[index].live and (
            self.nodes[index].function is not None or self._is_leaf(index)
        )

    def _find(self, index: int) -> int:
        while self._root[index] != index:
            self._root[index] = self._root[self._root[index]]
            index = self._root[index]
        return index

    def _union(self, a: int, b: int) -> None:
        a, b = self._find(a), self._find(b)
        self._root[max(a, b)] = min(a, b)

    def _is_leaf(self, index: int) -> bool:
        """Whether a node is a parameter, or an input that requires a gradient."""
        node = self.nodes[index]
        return node.function is None and (node.parameter is not None or node.wanted)

    def _join(self) -> set[int]:
        """Joins nodes without a factor in between; returns the nodes of edges that cannot have
        one."""
        tied: set[int] = set()
        for index, i in self.edges:
            node = self.nodes[index]
            if self._is_forced(node, i) or self._is_written(node, i):
                tied |= {index, i.node}
                self._union(index, i.node)
                if self._is_written(node, i):
                    tied |= self._join_base(i.node)
            elif (index, i.slot) not in self._free and not self._is_leaf(i.node):
                self._union(index, i.node)
        return tied | self._joined()

    def _joined(self) -> set[int]:
        """Joins all calls where gauges are tracked through calls that a replay does not see, whose
        results have none: returns these nodes."""
        calls = [i for i, n in enumerate(self.nodes) if n.live and not self._is_leaf(i)]
        hidden = any(self.nodes[i].function and self.nodes[i].key is None for i in calls)
        if not (self._settled.varying and hidden):
            return set()
        for index in calls:
            self._union(calls[0], index)
        return set(calls)

    def _boundaries(self) -> Counter[int]:
        """For each call, the number of edges that would need a factor if it had its own gauge."""
        edges = [(r, i.node) for r, i in self.edges if (r, i.slot) not in self._free]
        return Counter(n for edge in edges if not self._is_leaf(edge[1]) for n in edge)

    def _growth(self, small: Mapping[tuple[int, Slot], float]) -> list[float]:
        """For each node, by how many octaves more than `GROWTH` its gradient grows when the small
        parameters learn that it is multiplied by on all of its paths.
        """
        found: list[float] = [math.inf] * len(self.nodes)
        parameters: dict[int, dict[Slot, float]] = defaultdict(dict)
        for (index, slot), size in small.items():
            parameters[index][slot] = -size
        for index, i in reversed(self.edges):
            after = found[index] if found[index] < math.inf else 0.0
            own = sum(size for slot, size in parameters[index].items() if slot != i.slot)
            found[i.node] = min(found[i.node], after + own)
        return [max(0.0, size - GROWTH) if size < math.inf else 0.0 for size in found]

    def _is_written(self, node: CallNode, i: Input) -> bool:
        return i.slot in node.written

    def _join_base(self, index: int) -> set[int]:
        """Joins a tensor written in place with everything it is a view of."""
        joined = {index}
        while self.nodes[index].kind in TRANSPARENT and self.nodes[index].inputs:
            above = self.nodes[index].inputs[0].node
            self._union(index, above)
            index = above
            joined.add(index)
        return joined

    def _wanted(self, index: int) -> float | None:
        """The exponent that brings the gradient of a call to RMS 1. For a product whose factor is
        applied outside its kernels, that of the gradient that the kernels receive.
        """
        node, key = self.nodes[index], self.nodes[index].key
        found = None if key is None else self._measured.gradients.get(key)
        step = None if key is None else self.plan.steps.get(key)
        if found is None:
            return None
        wanted = -found - self._grows[index]
        if step is None or not self.is_product(index):
            return wanted
        return wanted - math.log2(abs(factor_after(step, node.function, node.args, node.kwargs)))

    def _choose(self) -> None:
        members: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            if node.live and not self._is_leaf(index):
                members[self._find(index)].append(index)
        chosen = {root: self._of_region(calls) for root, calls in members.items()}
        for index in reversed(range(len(self.nodes))):  # zero gradients: the gauge of their reader
            root = self._find(index)
            if root in chosen and chosen[root] is None:
                chosen[root] = next(
                    (
                        c
                        for r in self.flow.readers[index]
                        if (c := chosen.get(self._find(r))) is not None
                    ),
                    None,
                )
        for root, calls in members.items():
            for index in calls:
                self.exponents[index] = self._own(index, chosen[root] or 0)
        leaves = [index for index in range(len(self.nodes)) if self._is_leaf(index)]
        weights = dict(self._biases())
        for index in sorted(leaves, key=weights.__contains__):  # biases after their weights
            near = [weights[index]] if index in weights else self._readers[index]
            self.exponents[index] = self._of_leaf(index, near, chosen)
        self._agree(index for index in leaves if not self._is_bound(index, chosen))

    def _one(self) -> int:
        """The gauge of all tensors, inputs too, of a model that calls `torch.autograd.grad`, whose
        own gradients are true then: in the middle of those of its products.
        """
        names = [node.parameter for node in self.nodes if node.parameter is not None]
        known = [c for name in names if (c := self._settled.parameters.get(name)) is not None]
        if known:
            return known[0] - (self.plan.outside or 0)
        products = filter(self.is_product, range(len(self.nodes)))
        wanted = sorted(w for index in products if (w := self._wanted(index)) is not None)
        if not wanted:  # inside torch.vmap
            sizes = self._measured.parameters
            wanted = sorted(-sizes[name] for name in names if name in sizes)
        middle = round(wanted[len(wanted) // 2]) if wanted else 0
        shared = agreed_once(self._model, dict.fromkeys(names, middle))
        return next(iter(shared.values()), 0)

    def _agree(self, leaves: Iterable[int]) -> None:
        """Gives parameters the exponents that they have in all processes."""
        names = {index: self.nodes[index].parameter for index in leaves}
        own = {
            name: self.exponents[index]
            for index, name in names.items()
            if name is not None and name not in self._settled.parameters and not self._true
        }
        shared = agreed_once(self._model, own)
        for index, name in names.items():
            self.exponents[index] = shared.get(name or "", self.exponents[index])

    def _biases(self) -> Iterator[tuple[int, int]]:
        """(bias, weight) of products, which apply the factor of their weight to both."""
        for node in self.nodes:
            step = None if node.key is None else self.plan.steps.get(node.key)
            names, at = operands(node, step), {i.slot: i.node for i in node.inputs}
            if "bias" in names and "weight" in names:
                yield at[names["bias"]], at[names["weight"]]

    def _offset(self) -> int:
        """The offset to gauges fixed by another call signature, whose gradient may have another
        initial scale.
        """
        known, keys = self._settled.gauges, enumerate(node.key for node in self.nodes)
        both = [(i, known[key]) for i, key in keys if key is not None and key in known]
        moves = sorted(w - gauge for i, gauge in both if (w := self._wanted(i)) is not None)
        return round(moves[len(moves) // 2]) if moves else 0

    def _of_region(self, calls: list[int]) -> int | None:
        if self._true and any(self._is_leaf(i.node) for i in self._forced(calls)):
            return 0
        for i in self._forced(calls):
            known = self._settled.parameters.get(self.nodes[i.node].parameter or "")
            if known is not None:
                return known - (self.plan.outside or 0)
        for index in calls:
            key = self.nodes[index].key
            if key in self._settled.gauges and self.is_product(index):
                return self._settled.gauges[key] + self._shift
        found = [(i, w) for i in calls if (w := self._wanted(i)) is not None]
        products = [(i, w) for i, w in found if self.is_product(i)]
        wanted = [(w, self._boundary[i]) for i, w in products or found]
        if not wanted:
            return None
        middle = sorted(wanted)[len(wanted) // 2][0]
        candidates = sorted({round(w) for w, _ in wanted}, key=lambda c: (abs(c - middle), c))
        return min(candidates, key=lambda c: sum(n for w, n in wanted if abs(c - w) > REACH))

    def _forced(self, calls: list[int]) -> list[Input]:
        members = set(calls)
        edges = ((self.nodes[index], i) for index, i in self.edges if index in members)
        return [i for node, i in edges if self._is_forced(node, i)]

    def _is_forced(self, node: CallNode, i: Input) -> bool:
        """Whether an argument of a call can have no factor: a replay does not see the call, an
        autograd function computes its gradient, or the argument is sparse."""
        return node.key is None or bool(node.inside) or not is_strided(node.tensors[i.slot])

    def is_product(self, index: int) -> bool:
        return self.nodes[index].kind in PRODUCTS | RECURRENT

    def _own(self, index: int, region: int) -> int:
        """The exponent of a call: that of its region, or its own for a product that it does not
        suit.
        """
        wanted = self._wanted(index)
        if not self.is_product(index) or index in self._tied or wanted is None:
            return region
        key = self.nodes[index].key
        if key in self._settled.gauges:
            return self._settled.gauges[key] + self._shift
        return region if abs(region - wanted) <= REACH else round(wanted)

    def _is_bound(self, index: int, chosen: Mapping[int, int | None]) -> bool:
        """Whether a parameter has the gauge of a region."""
        return self._find(index) in chosen or index in self._tied

    def _of_leaf(self, index: int, near: Iterable[int], chosen: Mapping[int, int | None]) -> int:
        """near: the nodes whose gauge needs no factor for this one."""
        node = self.nodes[index]
        if self._is_bound(index, chosen):
            return chosen.get(self._find(index)) or 0
        name = node.parameter
        if name is None or self._true:
            return 0
        if name in self._settled.parameters:
            return self._settled.parameters[name] - (self.plan.outside or 0)
        gauges = [self.exponents[other] for other in near]
        found = self._gradient(index)
        if found is None:
            return gauges[0] if gauges else 0
        found += self._grows[index]
        return next((c for c in gauges if abs(c + found) <= REACH), round(-found))

    def _gradient(self, index: int) -> float | None:
        """log2 of the RMS of a parameter's gradient; None if it is zero.

        A gradient that only rounding keeps from zero is zero too, such as that of the bias of keys,
        or of a bias in front of a batch norm: a gauge would bring rounding errors to RMS 1.
        """
        found = self._measured.parameters.get(self.nodes[index].parameter or "")
        errors = [e for r in self._terms(index) if (e := self._rounding(r)) is not None]
        if found is None or not errors:
            return found
        norm = found + math.log2(self.nodes[index].numel) / 2
        return None if norm < max(errors) else found

    def _rounding(self, index: int) -> float | None:
        """log2 of the norm of the rounding errors of the gradient that a call computes from: that
        of its result times its factor.
        """
        node = self.nodes[index]
        if node.key is None or node.key not in self._measured.rounding:
            return None
        step = self.plan.steps.get(node.key) or Step()
        factor = step.output * (_rule(node, step) if operands(node, step) else 1.0)
        return self._measured.rounding[node.key] + math.log2(abs(factor))

    def _terms(self, index: int) -> Iterator[int]:
        """The calls, moves aside, that a parameter is an argument of: its gradient is a sum over
        those of their results.
        """
        for reader in self._readers[index]:
            if self.nodes[reader].kind in TRANSPARENT:
                yield from self._terms(reader)
            else:
                yield reader


def operands(node: CallNode, step: Step | None) -> dict[str, Slot]:
    """The tensor operands of a product, by the names of their scales in its op. Empty if some
    of them are not arguments of the call, but parts of one or reshaped.
    """
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
    of a sum over positions depends on their number.
    """
    steps = planned.plan.steps
    for node in planned.flow.nodes:
        step = None if node.key is None else steps.get(node.key)
        if node.key is not None and step is not None and operands(node, step):
            factor = settled.factors.setdefault((node.key, step.op or ""), _rule(node, step))
            constraint = tuple((name, factor) for name in ("output", *operands(node, step)))
            steps[node.key] = _gauged(node, replace(step, constraint=constraint), {})
    return planned


def place(
    planned: Planned, measured: Measured, settled: Settled, true_gradients: bool, model: str
) -> None:
    """Writes corrections and gauges into a plan.

    true_gradients: whether the gradients of parameters must be exactly those of the model.
    model: its name in the agreements of processes.
    """
    plan, nodes = planned.plan, planned.flow.nodes
    for index, node in enumerate(nodes):
        if node.key is not None and index in planned.checked:
            exponent = plan.corrections[node.place] = measured.corrections.get(node.place, 0)
            if exponent:
                known = plan.steps.get(node.key) or Step()
                plan.steps[node.key] = replace(known, output=known.output * 2.0**exponent)
    _scale_operands(planned, measured, settled)
    for node in nodes:
        step = None if node.key is None else plan.steps.get(node.key)
        if node.key is not None and step is not None and (0,) in node.written:
            plan.steps[node.key] = replace(step, writes=True)
    regions = _Regions(planned, measured, settled, true_gradients, model)
    ratios: dict[int, dict[Slot, int]] = defaultdict(dict)
    for index, i in regions.edges:
        ratio = regions.exponents[i.node] - regions.exponents[index]
        if ratio:
            ratios[index][i.slot] = ratio
    for index, node in enumerate(nodes):
        step = None if node.key is None else plan.steps.get(node.key)
        if node.key is not None and (index in ratios or operands(node, step)):
            plan.steps[node.key] = _gauged(node, step, ratios[index])
    for index, node in enumerate(nodes):
        if node.key in plan.steps and regions.is_product(index):
            plan.gauges[node.key] = regions.exponents[index]
            if node.key not in measured.gradients:
                plan.unseen += (node.key,)
        if node.parameter is not None:
            plan.parameters[node.parameter] = regions.exponents[index]
            if node.parameter not in measured.parameters and is_alone():
                plan.idle += (node.parameter,)
    planned.exponents.extend(regions.exponents)
    note_places(planned, regions.edges, regions.exponents)
    for number, (row, index) in enumerate(zip(plan.rows, planned.rows, strict=True)):
        node = nodes[index]
        correction = plan.corrections.get(node.place, 0) if index in planned.checked else 0
        plan.rows[number] = _told(row, node, regions.exponents[index], correction)


def note_places(
    planned: Planned, edges: Iterable[tuple[int, Input]], exponents: Sequence[int]
) -> None:
    """Writes the calls of a plan and their places, with the gauges of the results ``exponents``.

    edges: (call, argument with a gradient).
    """
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
    The bias is multiplied by all of them, as it is divided with the result.
    """
    found: dict[Key, dict[Slot, float]] = defaultdict(dict)
    for (key, slot), size in measured.operands.items():
        own = -round(size) if abs(size) > REACH else 0
        exponent = planned.plan.operands[key, slot] = settled.operands.get((key, slot), own)
        if exponent:
            found[key][slot] = 2.0**exponent
    steps = planned.plan.steps
    biases = {planned.flow.nodes[index].key: bias for index, bias in planned.products.items()}
    for key in found:
        bias = biases[key]
        factors, whole = found[key], math.prod(found[key].values())
        factors |= {} if bias is None else {bias: whole}
        step = with_slots(steps.get(key), [(slot, f, f) for slot, f in factors.items()])
        assert step is not None
        steps[key] = replace(step, output=step.output / whole)


def _gauged(node: CallNode, step: Step | None, ratios: dict[Slot, int]) -> Step:
    """The step with a power of two for the gradient of each argument."""
    names = operands(node, step)
    if not names:
        return with_slots(step, [(slot, 1.0, 2.0**e) for slot, e in ratios.items()]) or Step()
    assert step is not None
    output = step.output * _rule(node, step)
    scales = {name: output * 2.0 ** ratios.pop(slot, 0) for name, slot in names.items()}
    if "bias" in scales:  # the product applies the weight's factor to the bias
        rest = scales["bias"] / scales["weight"]
        scales["bias"] = scales["weight"]
        if rest != 1:
            ratios[names["bias"]] = round(math.log2(rest))
    step = replace(step, output=1.0, constraint=(("output", output), *scales.items()))
    return with_slots(step, [(slot, 1.0, 2.0**e) for slot, e in ratios.items()]) or step


def _rule(node: CallNode, step: Step) -> float:
    """The output factor of a product's op."""
    assert step.op is not None
    op, constraint = OPS[step.op], step.constraint
    return op.scales(node.args, node.kwargs, func=node.function, constraint=constraint)["output"]


def _told(row: CallRow, node: CallNode, exponent: int, correction: int) -> CallRow:
    """The report row of a call, with the correction of its factor and, for a product, its gauge."""
    said = [row.why] if row.why else []
    if correction:
        said.append(f"measured: times {2.0**correction:g}")
    if node.kind in PRODUCTS | RECURRENT:
        said.append(f"gradient times {2.0**exponent:g}")
    done = MEASURED if correction and row.left_alone else row.done
    return replace(row, done=done, why=", ".join(said))
