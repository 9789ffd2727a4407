"""The loss of a model that is made of parts, which go on weighing what they did.

The gradient of a loss of `functional` is that of a sum over examples, at unit scale: how much it
*grows* over torch's is a matter of shapes. Parts that each grew by itself would weigh something
else than the model says. So where a model makes several single numbers of its values, they are
computed as they were, forward and backward, and so is what they are made of since the last product.
Where they enter the arithmetic of numbers their gradient is multiplied, all by one factor: it
brings to unit scale that part whose gradient is the largest.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch

from .._functional.losses import reduction_of
from ..ops import find_op
from .calls import AVERAGES, LINEAR, LOSSES, MOVES, UNRULED_LOSSES
from .flow import Flow, reached
from .record import DISTRIBUTION, Node, Slot
from .results import Results
from .steps import Decision, Step

__all__ = ["Loss"]

_POWERS = {
    **dict.fromkeys(("mean", "var", "std", "logsumexp"), 1.0),
    **dict.fromkeys(("norm", "vector_norm"), 0.5),
    **dict.fromkeys(("sum", *MOVES), 0.0),
}
"""What makes one number of n values: the gradient of each has a size of about n**-power."""


class Loss:
    """parts: call -> the arguments by which a part enters, or () where the call makes it.

    numbers: the calls from there on. above: what the parts are made of since the last product. All
    are empty where there is one part, and rules for its calls. growth: (factor, whether
    it is for each element of the first argument of the first part), so that gradients follow the
    size of the batch as those of a sum do.
    """

    def __init__(self, flow: Flow, results: Results) -> None:
        self.flow = flow
        self._single: list[bool] = []
        for node, sources in zip(flow.nodes, flow.sources, strict=True):
            made = bool(sources) and all(self._single[s] for s in sources)
            self._single.append(node.floating and (made or node.shape == ()))
        self.numbers = self._closed() if results.whole else set()
        self.parts = {i: slots for i in sorted(self.numbers) if (slots := self._entrances(i))}
        unruled = any(flow.nodes[i].kind in UNRULED_LOSSES for i in self.parts)
        if sum(map(len, self.parts.values())) < 2 and not unruled:
            self.numbers, self.parts = set(), {}
        self.above = self._made_of(results)
        self.growth = self._common()

    def _closed(self) -> set[int]:
        """The single numbers that only arithmetic of such is done with."""
        flow, found = self.flow, set[int]()
        for index in reversed(range(len(flow.nodes))):
            node = flow.nodes[index]
            value = node.live and not node.computed and not flow.data[index]
            seen = node.key is not None and node.inside in ("", DISTRIBUTION)
            ends = all(reader in found and self._is_pure(reader) for reader in flow.readers[index])
            if value and seen and ends and self._single[index] and not flow.is_product(index):
                found.add(index)
        return found

    def _is_pure(self, index: int) -> bool:
        """Whether a call computes with single numbers alone."""
        sources = self.flow.sources[index]
        return bool(sources) and all(self._single[s] for s in sources)

    def _entrances(self, index: int) -> list[Slot]:
        nodes, data = self.flow.nodes, self.flow.data
        if not self._is_pure(index):
            return [()]
        outside = [i for i in nodes[index].inputs if i.node not in self.numbers]
        return [i.slot for i in outside if nodes[i.node].live and not data[i.node]]

    def _made_of(self, results: Results) -> set[int]:
        def sources(index: int) -> list[int]:
            above = self.flow.sources[index]
            return [i for i in above if not (self.flow.is_product(i) or results.mixes[i])]

        return reached([i for i, slots in self.parts.items() if () in slots], sources)

    # The factor

    def __contains__(self, index: int) -> bool:
        """Whether the plan of a call is that of `decide`."""
        losses = index in self.above and self.flow.nodes[index].kind in LOSSES
        return losses or index in self.numbers

    def without(self, bridges: list[bool]) -> list[bool]:
        """The bridges that are not in a loss of several parts, whose gradients have no factor."""
        return [bridge and index not in self.above for index, bridge in enumerate(bridges)]

    def decide(self, index: int, step: Step | None) -> Decision:
        """As a decision of the plan. step: what the call has to do as it is."""
        if index not in self.parts:
            return step, "unchanged", "in a loss of several parts"
        factor, follows = self.growth
        first = min(self.parts)
        grown = factor * self.flow.nodes[first].inputs[0].numel if follows else factor
        step = replace(step or Step(), parts=tuple(self.parts[index]))
        if index == first:
            step = replace(step, growth=self.growth)
        return step, "scaled", f"a part of the loss: gradient times {grown:.3g}, as all of them"

    def _common(self) -> tuple[float, bool]:
        """The growth: a part has a gradient of its weight over its own."""
        grown, weights = self._grown(), self._weights()
        sizes = {i: grown[i] / weights[i] for i in self.parts if i in grown and weights[i]}
        main = min(sizes, key=lambda i: sizes[i], default=-1)
        if main < 0 or math.isinf(sizes[main]):
            return 1.0, False
        first = self.flow.nodes[min(self.parts)]
        if _averages(first) and _averages(self.flow.nodes[main]):
            return sizes[main] / first.inputs[0].numel, True
        return sizes[main], False

    def _grown(self) -> dict[int, float]:
        """For each call above, how much smaller than its own the gradients are that it hands back
        to what the loss is made of; infinite where that is not known.
        """
        grown: dict[int, float] = {}
        for index in sorted(self.above):
            node = self.flow.nodes[index]
            if index in self.parts and node.kind not in LOSSES:
                count = max(i.numel for i in node.inputs)
                factor = count ** _POWERS[node.kind] if node.kind in _POWERS else math.inf
            elif node.kind in ("mul", "div"):
                number = _factor(node) / (_divisor(node) if self.flow.inverts(index) else 1.0)
                gains = (self.flow.nodes[i.node] for i in node.inputs if i.numel == 1)
                number *= math.prod(gain.rms for gain in gains if gain.computed)
                factor = 1 / number if number else math.inf
            elif node.kind == "exp" and self._of_logarithms(index):
                factor = 1.0  # a probability, or a ratio of two that is near 1
            else:
                factor = _growth(node)
            made = (s for s in self.flow.sources[index] if not self.flow.data[s])
            before = [grown[s] for s in made if s in grown]
            grown[index] = min(before, default=1.0) * factor
        return grown

    def _of_logarithms(self, index: int) -> bool:
        """Whether the argument of a call is made of logarithms of probabilities, linearly."""
        nodes, sources = self.flow.nodes, self.flow.sources
        linear = LINEAR | MOVES | {"gather", "sum", "exp"}
        above = reached([index], lambda i: sources[i] if nodes[i].kind in linear else ())
        return any(nodes[i].kind == "log_softmax" or nodes[i].inside for i in above)

    def _weights(self) -> dict[int, float]:
        """What the numbers are multiplied by, as far as numbers of Python do it."""
        nodes, weights = self.flow.nodes, dict[int, float]()
        for index in sorted(self.numbers, reverse=True):
            after = [weights[r] * _factor(nodes[r]) for r in self.flow.readers[index]]
            weights[index] = sum(after) if after else 1.0
        return weights


def _factor(node: Node) -> float:
    """What a call multiplies a single number by, or its share in a mean."""
    numbers = [abs(n) for n in (*node.args, *node.kwargs.values()) if isinstance(n, int | float)]
    if node.kind == "mean":
        return 1 / max(1, *(i.numel for i in node.inputs))
    if node.kind not in ("mul", "div") or not numbers:
        return 1.0
    if node.kind == "mul":
        return float(numbers[0])
    return 1 / numbers[0] if numbers[0] and not node.name.startswith("__r") else 1.0


def _divisor(node: Node) -> float:
    """The size of the value that a call divides by: the sums of a Dice loss, say."""
    size = node.args[-1].detach().float().abs().mean().item() if len(node.args) == 2 else 1.0
    return size if 0 < size < math.inf else 1.0


def _averages(node: Node) -> bool:
    """Whether a call divides by how many values it gets."""
    return "mean" in _reduction(node)[0] if node.kind in LOSSES else node.kind in AVERAGES


def _growth(node: Node) -> float:
    """How much larger the gradient of the unit-scaled call is: of a loss, it is that of a sum."""
    op, settings = find_op(node.function), {"func": node.function, "constraint": None}
    scales = {} if op is None else op.scales(node.args, node.kwargs, **settings)
    scale = next((s for name, s in scales.items() if name != "output"), 1.0)
    if node.kind in LOSSES:
        assert node.function is not None
        kind, rest = _reduction(node)
        if kind == "batchmean":
            scale *= len(rest["input"])
        elif kind == "mean":
            with torch.no_grad():
                scale *= node.function(**rest, reduction="none").numel()
    return scale


def _reduction(node: Node) -> tuple[str, dict[str, Any]]:
    """The reduction of a loss of torch, and its other arguments by name."""
    assert node.function is not None
    given = inspect.signature(node.function).bind(*node.args, **node.kwargs).arguments
    kind = given.pop("reduction", "mean")
    legacy = given.pop("size_average", None), given.pop("reduce", None)
    return reduction_of(kind, *legacy, allowed=(kind,)), given
