"""How much batch norms make gradients grow, and the cut edges where that is taken back.

A batch norm divides by the deviation of each channel, which is less than its RMS where channels
have a mean: if a share m of the energy of values is that of means, so it is of a product of them,
and the energy of its gradient is 1/(1 - m). After a ReLU of normal numbers m = 1/pi: gradients
grow by pi/(pi - 1) a layer (Yang et al., "A Mean Field Theory of Batch Normalization", 2019).

This is a property of the function: no factor around a skip connection could change it. At the next
bridge of the graph, where any factor is allowed (Unit Scaling, section 3), it is taken back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops import find_op
from ..quadrature import normal_means
from .calls import ATTENTION, ELEMENTWISE, LINEAR, PRODUCTS, TRANSPARENT
from .flow import Flow
from .record import Input, Node, replaced
from .residuals import Residuals, leans

__all__ = ["gradient_factors"]

_NORMS = frozenset(["batch_norm", "instance_norm"])
_POOLS = frozenset(["max_pool1d", "max_pool2d", "max_pool3d"])
_ADDS = frozenset(["add", "sub"])
_KEEPS = TRANSPARENT | frozenset(["pad"])
_NEAR_ONE = 0.1
"""Energy that is nearer to 1 than this is left to the next bridge: a factor costs a pass."""
_KNOWN = (_NORMS | _POOLS | _ADDS | _KEEPS | ELEMENTWISE | PRODUCTS) - ATTENTION


def gradient_factors(flow: Flow, bridges: list[bool], residuals: Residuals) -> dict[int, float]:
    """Bridge -> what its gradient is to be multiplied by, if batch norms below it made that grow.

    Where a call that this knows nothing of is in the way, nothing is taken back.
    """
    if all(node.kind not in _NORMS for node in flow.nodes):
        return {}
    return _Growth(flow, bridges, residuals).factors()


class _Growth:
    """means: for the result of each call, the share of its energy that is that of its means."""

    def __init__(self, flow: Flow, bridges: list[bool], residuals: Residuals) -> None:
        self.flow, self.bridges, self.residuals = flow, bridges, residuals
        self.means = [0.0] * len(flow.nodes)
        for index, node in enumerate(flow.nodes):
            self.means[index] = self._mean(index, node)

    def factors(self) -> dict[int, float]:
        nodes, found = self.flow.nodes, {}
        # What nothing reads is a result: its gradient comes from outside, at RMS 1.
        energy = [0.0 if self.flow.readers[i] else 1.0 for i in range(len(nodes))]
        grown = [False] * len(nodes)
        for index in reversed(range(len(nodes))):
            node = nodes[index]
            if self.bridges[index]:
                if not grown[index] or math.isnan(energy[index]):
                    energy[index], grown[index] = 1.0, False
                elif node.key is not None and abs(energy[index] - 1) > _NEAR_ONE:
                    found[index] = energy[index] ** -0.5
                    energy[index], grown[index] = 1.0, False
            for i in node.inputs:
                if i.node in self.flow.sources[index]:
                    energy[i.node] += energy[index] * self._gain(index, node, i)
                    grown[i.node] |= grown[index] or node.kind in _NORMS
        return found

    def _mean(self, index: int, node: Node) -> float:
        live = [i for i in node.inputs if i.node in self.flow.sources[index]]
        if not live or node.kind in _NORMS:
            return 0.0
        weights, _ = self.residuals.adds.get(index, ((), ""))
        squares = {slot: forward**2 for slot, forward, _ in weights}
        shares = [squares.get(i.slot, 1 / len(live)) * self.means[i.node] for i in live]
        if node.kind in _POOLS:
            return _mean_of_largest(node)
        if node.kind in ELEMENTWISE - LINEAR and len(node.inputs) == 1:
            return _mean_after(node, live[0], shares[0])
        return sum(shares)

    def _gain(self, index: int, node: Node, i: Input) -> float:
        """Energy of the gradient of an argument for that of the result; NaN if not known."""
        gain = self.residuals.splits.get((index, i.slot), 1.0) ** 2
        if index in self.residuals.adds:
            weights, _ = self.residuals.adds[index]
            return gain * math.prod(back**2 for slot, _, back in weights if slot == i.slot)
        if node.kind in _ADDS:
            return gain / len(self.flow.sources[index])
        if node.kind == "cat":
            return gain
        if node.kind == "pad":
            gain *= node.numel / i.numel  # what the padding collects is lost
        mean = self.means[i.node]
        if node.kind not in _KNOWN or len(self.flow.sources[index]) > 1 or mean >= 1:
            return math.nan
        if node.kind in _NORMS:
            return gain / (1 - mean)
        if node.kind in PRODUCTS and not self.bridges[index]:
            op = find_op(node.function)
            args, kwargs = node.args, node.kwargs
            s = {} if op is None else op.scales(args, kwargs, func=node.function, constraint=None)
            return gain * (s["output"] / s["input"]) ** 2 if "input" in s else math.nan
        if leans(self.flow, self.residuals, index):  # the share of the values that are positive
            return gain * (1 + math.erf((mean / (1 - mean) / 2) ** 0.5)) / 2
        return gain


def _mean_after(node: Node, i: Input, mean: float) -> float:
    """The share of the means after a function of normal numbers with this share of means."""

    def moments(z: Tensor) -> Tensor:
        x = mean**0.5 + (1 - mean) ** 0.5 * z
        assert node.function is not None
        y = node.function(*replaced(node.args, {i.slot: x}), **replaced(node.kwargs, {i.slot: x}))
        return torch.stack([y.clamp_min(0), (-y).clamp_min(0), y.square()])

    try:
        above, below, square = normal_means(moments)
    except ValueError:
        return mean
    return (above - below) ** 2 / square if square else 0.0


def _mean_of_largest(node: Node) -> float:
    """The same for the largest of as many positive parts of normal numbers as a pool takes."""
    size = node.kwargs.get("kernel_size", (*node.args, 1, 1)[1])
    count = size ** int(node.kind[-2]) if isinstance(size, int) else math.prod(size)

    def moments(z: Tensor) -> Tensor:
        x = z.relu()
        return count * torch.special.ndtr(z) ** (count - 1) * torch.stack([x, x.square()])

    mean, square = normal_means(moments)
    return mean**2 / square
