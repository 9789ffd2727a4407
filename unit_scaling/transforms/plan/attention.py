"""Attention, fused or decomposed: its factor depends on the number of keys.

The first recorded call fixes that number, so that later calls use the same factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...rules.table import OPS
from ..capture.dataflow import Flow
from ..capture.kinds import ATTENTION
from ..capture.record import CallNode
from ..capture.values import MASKING, has_values
from .actions import Decision, Settings, Step


class Attention:
    """Decides on softmaxes of attention, their products with values, and fused attention."""

    def __init__(self, flow: Flow, settings: Settings) -> None:
        self.flow = flow
        self._settings = settings
        #: The calls that use the factor of a fixed number of keys but have another number here.
        self.of_others: set[int] = set()
        self._averages: dict[int, int] = {}  # product of attention weights and values -> keys

    def decide(self, index: int, node: CallNode) -> Decision | None:
        """The decision for a call; None if it is not part of attention."""
        if index in self._averages:
            keys = self._averages[index]
            factor = keys**-0.5
            constraint = (("output", factor), ("left", factor), ("right", factor))
            return Step(op="matmul", constraint=constraint), "scaled", f"attention over {keys} keys"
        if node.kind == "softmax":
            return self._softmax(index, node)
        return self._fused(index, node) if node.kind in ATTENTION else None

    def _softmax(self, index: int, node: CallNode) -> Decision | None:
        """The softmax of decomposed attention, scaled for a fixed number of keys."""
        product = self.flow.weighs(index)
        if product is None or self.flow.nodes[product].kind != "matmul":
            return None
        dim = OPS["softmax"].bind(node.args, node.kwargs, node.function).get("dim", -1)
        keys, _ = self._keys(index, node, node.shape[-1 if dim is None else dim])
        if index in self.of_others:
            self.of_others.add(product)
        self._averages[product] = keys
        factor = OPS["softmax"].rule(torch.empty(keys, device="meta"), 0)["output"]
        return Step(output=factor), "scaled", f"attention over {keys} keys"

    def _fused(self, index: int, node: CallNode) -> Decision:
        """Fused attention: the same factor for every sequence length."""
        op = OPS[node.kind]
        given = op.bind(node.args, node.kwargs, node.function)
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        keys, always = self._keys(
            index, node, given["value"].shape[-2], causal or _sees_the_past(mask)
        )
        settings, output = {"context_length": keys, "is_causal": always}, 1.0
        if mask is None and causal != always:  # the argument also changes what is computed
            output = op.scales((), {**given, **settings})["output"]
            output /= op.scales((), {**given, **settings, "is_causal": causal})["output"]
            del settings["is_causal"]
        step = Step(op=node.kind, settings=(*settings.items(),), output=output)
        return step, "scaled", f"over {keys} keys" + (", of the past" if always else "")

    def _keys(
        self, index: int, node: CallNode, seen: int, causal: bool = False
    ) -> tuple[int, bool]:
        """(the number of keys to scale for, whether it is causal), fixed at the first call."""
        assert node.key is not None
        found = (self._settings.context or seen, causal)
        settled = self._settings.settled.keys.setdefault(node.key, found)
        if settled != (seen, causal):
            self.of_others.add(index)
        return settled


def _sees_the_past(mask: Tensor | None) -> bool:
    """Whether an attention mask lets the first query see only the first key."""
    if mask is None or mask.ndim < 2 or min(mask.shape[-2:]) < 2 or not has_values([mask]):
        return False
    seen = mask if mask.dtype == torch.bool else mask > MASKING
    return not bool(seen[..., 0, 1:].any())
