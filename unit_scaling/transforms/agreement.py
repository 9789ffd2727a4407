"""How much positions agree: what an average leaves of them, and what weights' gradients grow by.

The rules of the ops take positions for independent. They are not: of what a ReLU returns, 1/pi of
the energy is the same at all positions, and so is nearly all of what attention returns at first,
and the gradient of what is averaged. The *agreement* of a value is the mean product of two
positions over their mean square; what becomes of it in a function f of normal numbers is
E[f(u) f(v)] / E[f(u)^2] (Poole et al., "Exponential expressivity in deep neural networks through
transient chaos", 2016), and with the derivative of f, that of a gradient (Schoenholz et al., "Deep
Information Propagation", 2017).

An average of n positions that agree by a has the energy a + (1 - a)/n. The gradient of a weight
sums over N positions: where these agree by b besides, its energy is 1 + (N - 1) a b times as large.
What is not known counts as independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..constant import aside
from ..ops import find_op
from .calls import ATTENTION, AVERAGES, ELEMENTWISE, LINEAR, PRODUCTS, SELECTIONS, TRANSPARENT
from .errors import of_loss
from .flow import Flow, is_read_by_positions
from .record import Input, Node, replaced, sees_the_past, tensors_in
from .residuals import Residuals, leans
from .steps import Scaling
from .units import Unit, run_unit

__all__ = ["Agreement"]

Shares = tuple[float, ...]
"""The agreement of two positions of one sample, of positions of two samples, and the share of the
energy that is the same in all features, which a layer norm takes off.
"""

_NONE: Shares = (0.0, 0.0, 0.0)
_KEEPS = (
    (LINEAR | TRANSPARENT | PRODUCTS) - ATTENTION - frozenset(["mul", "div"])
    | frozenset("layer_norm rms_norm group_norm log_softmax cat stack pad".split())
    | frozenset("max_pool1d max_pool2d max_pool3d".split())
)
"""Kinds that keep it in both directions; of several values, on average."""

_SPREADS = frozenset("add sub mul div expand expand_as broadcast_to".split())
"""Kinds in which many positions read a value."""

_NEAR_ONE = 0.5
"""Growth that is nearer to 1 than this is let be: a factor costs a pass over the weight."""


class Agreement:
    """values, gradients: of the result of each call, and of its gradient. units: by last call."""

    def __init__(
        self, flow: Flow, residuals: Residuals, units: Mapping[int, Unit], bridges: list[bool]
    ) -> None:
        self.flow, self.residuals, self.bridges = flow, residuals, bridges
        self.units = {call: unit for unit in units.values() for call in unit.calls}
        softmaxes = [i for i, node in enumerate(flow.nodes) if node.kind == "softmax"]
        softmaxes += [end for end, unit in units.items() if unit.name == "softmax"]
        weighed = map(flow.weighs, softmaxes)
        self._weighed = {product for product in weighed if product is not None}
        values = (n for n in flow.nodes if n.live and not n.computed and n.shape)
        self._batch = next((node.shape[0] or 1 for node in values), 1)
        self._slopes: dict[int, Shares] = {}
        self.values: list[Shares] = []
        for index, node in enumerate(flow.nodes):
            self.values.append(self._value(index, node))
        self.gradients = self._gradients()

    def average(self, index: int) -> float | None:
        """The factor of an average of values that agree; None where that of its op is right.

        What they have in common is what is left of many: the size of a window does not matter.
        """
        node, op = self.flow.nodes[index], find_op(self.flow.nodes[index].function)
        if leans(self.flow, self.residuals, index):
            return 1.0
        if node.kind not in AVERAGES or op is None or len(self.flow.sources[index]) != 1:
            return None
        (i,), kept = self._inputs(index), op.scales(node.args, node.kwargs, func=node.function)
        agreement, count = self.values[i.node][0], i.numel / max(1, node.numel)
        if kept["output"] == 1:  # a statistic, if anything but products reads it
            return _energy(agreement, count) ** -0.5 if self.flow.feeds_products(index) else None
        return agreement**-0.5 if agreement * count > 1 else None

    def own(self, index: int) -> tuple[tuple[Scaling, ...], str]:
        """Factors for the gradients of the weights of a product, and what to say of them."""
        node, growth = self.flow.nodes[index], self._growth(index)
        if node.kind not in PRODUCTS or growth - 1 < _NEAR_ONE:
            return (), ""
        computed = [i for i in node.inputs if self.flow.nodes[i.node].computed]
        slots = [i.slot for i in computed if len(self.flow.nodes[i.node].shape) > 1]
        why = f"gradient of the weight divided by {growth:.3g}: positions agree"
        return tuple((slot, 1.0, 1 / growth) for slot in slots), why if slots else ""

    def handed(self, index: int, i: Input) -> float:
        """How much positions of the gradient agree that a call hands to an argument."""
        return self._handed(index, self.flow.nodes[index], i, self.gradients[index])[1][0]

    def attended(self, index: int, i: Input) -> float:
        """The energy of the gradient that attention hands to its values for each query that a key
        has, over that of independent queries; 0 for queries and keys, whose own is small.
        """
        if i is not _value_of(self._inputs(index)):
            return 0.0
        return 1 + (self.flow.nodes[index].shape[-2] - 1) * self.gradients[index][0]

    def _growth(self, index: int) -> float:
        """The RMS of the gradient of a product's weight, over that of independent positions."""
        sources, positions = self.flow.sources[index], self._positions(index)
        if len(sources) != 1:
            return 1.0
        (a, c, _), (b, d, _) = self.values[sources[0]], self.gradients[index]
        others = (self._batch - 1) * positions
        return math.sqrt(1 + max(0.0, (positions - 1) * a * b + others * c * d))

    def _positions(self, index: int) -> float:
        """How many positions of a sample are summed up by the gradient of a weight."""
        node = self.flow.nodes[index]
        reads = node.kind.startswith("conv_transpose")  # a result has some of the weights only
        shape = self.flow.nodes[node.inputs[0].node].shape if reads else node.shape
        pooled = node.kind.startswith(("conv", "avg_pool", "adaptive_avg_pool"))
        features = shape[1 if pooled else -1] if len(shape) > 1 else 1
        return max(1.0, math.prod(shape) / max(1, features) / self._batch)

    def _inputs(self, index: int) -> list[Input]:
        return [i for i in self.flow.nodes[index].inputs if i.node in self.flow.sources[index]]

    # Values

    def _value(self, index: int, node: Node) -> Shares:
        inputs = self._inputs(index)
        if index in self.units:
            return self._of_unit(index, self.units[index])
        if not inputs:
            return _of_table(node) if node.kind == "embedding" else _NONE
        values = [self._spread_over(node, i) for i in inputs]
        if self.is_attention(index):
            return self._attended(index, node, self.values[_value_of(inputs).node], 2.0)
        if node.kind in ("mul", "div"):
            return _NONE if self.flow.inverts(index) else _product(values)
        if node.kind in _KEEPS:
            return self._kept(index, node, inputs)
        if len(inputs) > 1:
            return _NONE
        if node.kind == "batch_norm":
            return _centred(values[0], values[0][1])
        if node.kind in AVERAGES:
            return self._pooled(index, node, inputs[0])
        return self._curved(index, node, inputs[0]) if node.kind in ELEMENTWISE else _NONE

    def _kept(self, index: int, node: Node, inputs: list[Input]) -> Shares:
        """Of what adds up, the mean by energy; a table that is added counts as independent."""
        if node.kind == "layer_norm":
            return _centred(self.values[inputs[0].node], self.values[inputs[0].node][2])
        weights, _ = self.residuals.adds.get(index, ((), ""))
        squares = {slot: forward**2 for slot, forward, _ in weights}
        terms = [(squares.get(i.slot, 1.0), self._spread_over(node, i)) for i in inputs]
        if node.kind == "add":
            rows = [i for i in node.inputs if i.numel > node.shape[-1:][0]] if node.shape else []
            terms += [(1.0, _NONE) for i in rows if self.flow.nodes[i.node].computed]
        a, c, level = _mean(terms)
        return a, c, 0.0 if node.kind in PRODUCTS else level

    def _spread_over(self, node: Node, i: Input) -> Shares:
        """Of an argument where a call reads it: all positions that read one value agree."""
        a, c, level = self.values[i.node]
        before = self.flow.nodes[i.node].shape
        repeated = node.kind in _SPREADS and is_read_by_positions(before, node.shape)
        return 1.0 if repeated else a, c, level

    def _of_unit(self, index: int, unit: Unit) -> Shares:
        if index != unit.calls[-1] or unit.name == "softmax":
            return _NONE
        if unit.name != "formula":
            return self.values[unit.entry]
        return self._after(index, lambda x: run_unit(self.flow, unit, x), self.values[unit.entry])

    def _curved(self, index: int, node: Node, i: Input) -> Shares:
        """After a function of each element."""
        given = (*tensors_in(node.args), *tensors_in(node.kwargs))
        if any(t.numel() > 1 for slot, t in given if slot != i.slot):
            return _NONE

        def function(x: Tensor) -> Tensor:
            assert node.function is not None
            new = {i.slot: x}
            result: Tensor = node.function(*replaced(node.args, new), **replaced(node.kwargs, new))
            return result

        return self._after(index, function, self.values[i.node])

    def _after(self, index: int, function: Callable[[Tensor], Tensor], pair: Shares) -> Shares:
        known = (0.0, *(min(1.0, max(0.0, x)) for x in pair[:2]))
        (level, _), (a, slope), (c, other) = aside(
            lambda: [_agreements(function, x) for x in known]
        )
        self._slopes[index] = slope, other, 0.0
        return a, c, level

    def _pooled(self, index: int, node: Node, i: Input) -> Shares:
        a, c, level = self.values[i.node]
        energy = _energy(a, i.numel / max(1, node.numel))
        return 1.0 if self._positions(index) == 1 else a / energy, c / energy, level / energy

    def is_attention(self, index: int) -> bool:
        """Whether a call is attention, or the product of its weights and values."""
        return index in self._weighed or self.flow.nodes[index].kind in ATTENTION

    def _attended(self, index: int, node: Node, shares: Shares, past: float) -> Shares:
        """After an average over keys, or over queries for gradients: positions of one window of
        keys share the mean of the window, others what they did.

        past: for averages over the keys so far, the mean product of two, times their number: of i
        and j > i independent rows they share 1/j, so it is 2; for gradients, where the later key
        gets its share from fewer queries, 1.
        """
        value = self.flow.nodes[_value_of(self._inputs(index)).node].shape
        keys = max(1, value[-2]) if len(value) > 1 else 1
        positions = keys * value[0] / self._batch if len(value) == 4 else keys
        near = min(1.0, (keys - 1) / max(1.0, positions - 1))
        causal, alone = _averaging(node, keys)
        a, c, level = shares
        energy = a + (1 - a) * alone
        within = min(1.0, (a + (1 - a) * (past if causal else 1.0) / keys) / energy)
        return near * within + (1 - near) * a / energy, c / energy, level / energy

    # Gradients

    def _gradients(self) -> list[Shares]:
        nodes = self.flow.nodes
        parts: list[list[tuple[float, Shares]]] = [[] for _ in nodes]
        found = [_NONE] * len(nodes)
        ends = [i for i, n in enumerate(nodes) if n.live and not self.flow.readers[i]]
        losses = {i for i in ends if nodes[i].shape == ()}
        for index in reversed(range(len(nodes))):
            found[index] = _mean(parts[index])
            if not parts[index] and losses and index not in losses:
                continue  # what no loss is made of has no gradient
            unit = self.units.get(index)
            if unit is not None:
                if index == unit.calls[-1] and unit.name != "softmax":
                    pair = _product([found[index], self._slopes.get(index, (1.0, 1.0, 0.0))])
                    parts[unit.entry].append((1.0, pair))
                continue
            for i in self._inputs(index):
                parts[i.node].append(self._handed(index, nodes[index], i, found[index]))
        return found

    def _handed(self, index: int, node: Node, i: Input, pair: Shares) -> tuple[float, Shares]:
        """The energy of the gradient that a call hands to an argument, and its agreement."""
        energy = self.residuals.splits.get((index, i.slot), 1.0) ** 2
        weights, _ = self.residuals.adds.get(index, ((), ""))
        curved = self.flow.nodes[i.node].kind in ELEMENTWISE - LINEAR or i.node in self.units
        error = of_loss(node, self.values[i.node], curved)
        if error is not None:
            return energy, error
        energy *= math.prod(backward**2 for slot, _, backward in weights if slot == i.slot)
        inputs = self._inputs(index)
        if self.is_attention(index):
            if i is not _value_of(inputs):
                return 0.0, _NONE
            return energy, self._attended(index, node, pair, 1.0)
        if node.kind in ("mul", "div"):
            others = [self._spread_over(node, j) for j in inputs if j is not i]
            return energy, _product([pair, *others])
        if node.kind in SELECTIONS:
            share = node.numel / (i.numel or 1)
            before = self.flow.nodes[i.node].shape
            positions = before[:1] == node.shape[:1] and before[-1:] == node.shape[-1:]
            return energy * share, _times(pair, share) if positions else pair
        if node.kind in _KEEPS:
            return energy, _times(pair, self._density(node, i))
        if node.kind == "batch_norm":
            return energy, _centred(pair, pair[1])
        if node.kind in AVERAGES:
            return energy * self._spent(index, node, i), self._spread(index, node, i, pair)
        return energy, _product([pair, self._slopes.get(index, _NONE)])

    def _density(self, node: Node, i: Input) -> float:
        """Results of a convolution for each position that it reads: those between two of them get
        their gradients from other weights.
        """
        shape = self.flow.nodes[i.node].shape
        if not node.kind.startswith("conv") or len(shape) != len(node.shape):
            return 1.0
        return min(1.0, math.prod(node.shape[2:]) / max(1, math.prod(shape[2:])))

    def _spread(self, index: int, node: Node, i: Input, pair: Shares) -> Shares:
        """Positions of one window get the same gradient."""
        window, positions = i.numel / max(1, node.numel), self._positions(index)
        near = (window - 1) / max(1.0, positions * window - 1)
        within, across, _ = pair
        return within + (1 - within) * near, 1.0 if node.shape == () else across, 0.0

    def _spent(self, index: int, node: Node, i: Input) -> float:
        """The energy that an average hands to a position: 1, but where its factors are tied."""
        window = i.numel / max(1, node.numel)
        return (
            1.0
            if self.bridges[index]
            else 1 / (window**2 * _energy(self.values[i.node][0], window))
        )


def _energy(agreement: float, count: float) -> float:
    """That of an average of so many positions."""
    return agreement + (1 - agreement) / count


def _value_of(inputs: list[Input]) -> Input:
    """The values among the arguments of attention, or of the product with its weights."""
    return next((i for i in inputs if i.slot in (("value",), (2,))), inputs[-1])


def _averaging(node: Node, keys: int) -> tuple[bool, float]:
    """(whether attention is to the past only, the energy of what it makes of independent rows)."""
    op = find_op(node.function) if node.kind in ATTENTION else None
    if op is None:
        return False, 1 / keys
    given = op.bind(node.args, node.kwargs, node.function)
    causal = bool(given.get("is_causal")) or sees_the_past(given.get("attn_mask"))
    factor = op.scales((), {**given, "dropout_p": 0.0, "is_causal": causal})["output"]
    return causal, min(1.0, factor**-2)


def _product(many: list[Shares]) -> Shares:
    return tuple(math.prod(each) for each in zip(*many, strict=True))


def _times(shares: Shares, factor: float) -> Shares:
    return tuple(share * factor for share in shares)


def _mean(parts: list[tuple[float, Shares]]) -> Shares:
    """The shares of a sum of independent parts: (energy, shares) each."""
    total = sum(energy for energy, _ in parts)
    if not total:
        return _NONE
    columns = zip(*(_times(shares, energy / total) for energy, shares in parts), strict=True)
    return tuple(map(sum, columns))


def _centred(shares: Shares, mean: float) -> Shares:
    """After a mean with this share of the energy is taken off."""
    return tuple(max(0.0, each - mean) / (1 - mean) for each in shares) if mean < 1 else _NONE


def _of_table(node: Node) -> Shares:
    """Rows of a table, each as often as any other, agree by what they have in common. Those that
    are trained start independent: a plan made after a checkpoint was loaded is that of before."""
    found = [t for _, t in tensors_in((node.args, node.kwargs)) if t.is_floating_point()]
    if not found or found[0].is_meta or found[0].dim() != 2:
        return _NONE
    if found[0].requires_grad:
        shared = 1 / max(1, len(found[0]))
    else:
        table = found[0].detach().float()
        energy = table.square().sum(1).mean().item()
        shared = table.mean(0).square().sum().item() / energy if energy else 0.0
    return shared, shared, 0.0


NODES = 32


@cache
def _normal() -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())


def _agreements(function: Callable[[Tensor], Tensor], agreement: float) -> tuple[float, float]:
    """The agreement after a function of normal numbers, and that of its derivatives. Called aside,
    as a transform of torch.func refuses a gradient of its own to what is inside of it.
    """
    nodes, weights = _normal()
    shared, own = math.sqrt(agreement) * nodes, math.sqrt(1 - agreement) * nodes
    x = (shared[:, None] + own).flatten().requires_grad_()
    y = function(x.clone())
    (slope,) = torch.autograd.grad(y.sum(), x) if y.requires_grad else (torch.zeros_like(x),)
    found = []
    for values in (y.detach(), slope):
        values = values.double().view(NODES, NODES)
        energy = (weights @ values.square() @ weights).item()
        common = (weights @ (values @ weights).square()).item()
        found.append(common / energy if energy > 0 and math.isfinite(energy) else 0.0)
    return found[0], found[1]
