"""How attention is scaled: for one number of keys, whatever the length at hand."""

from __future__ import annotations

from typing import Any

import torch

from ..ops import OPS
from .flow import Flow
from .record import Node, sees_the_past
from .steps import Decision, Settings, Step

__all__ = ["Attention"]


class Attention:
    """averages: product of attention weights and values -> number of keys."""

    def __init__(self, flow: Flow, settings: Settings) -> None:
        self.flow, self.settings = flow, settings
        self.averages: dict[int, int] = {}

    def decide(self, index: int, node: Node) -> Decision | None:
        """The decision of the plan for a call of attention; None for any other."""
        if node.kind == "softmax":
            return self._softmax(index, node)
        if index in self.averages:
            keys = self.averages[index]
            step = Step(op="average", factor=keys**-0.5)
            return step, "scaled", f"attention over {keys} keys"
        return self._fused(node) if node.kind == "scaled_dot_product_attention" else None

    def _softmax(self, index: int, node: Node) -> Decision | None:
        product = self.flow.weighs(index)
        if product is None or self.flow.nodes[product].kind not in ("matmul", "bmm", "mm"):
            return None
        dim = OPS["softmax"].bind(node.args, node.kwargs, node.function).get("dim", -1)
        keys, _ = self._keys(node, node.shape[-1 if dim is None else dim])
        self.averages[product] = keys
        factor = OPS["softmax"].rule(torch.empty(keys, device="meta"), 0)["output"]
        return Step(output=(factor, factor)), "scaled", f"attention over {keys} keys"

    def _fused(self, node: Node) -> Decision:
        """Attention in one call: the same factor in every form of call."""
        op = OPS[node.kind]
        given = op.bind(node.args, node.kwargs, node.function)
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        keys, always = self._keys(node, given["value"].shape[-2], causal or sees_the_past(mask))
        settings: tuple[tuple[str, Any], ...]
        settings, output = (("context_length", keys), ("is_causal", always)), 1.0
        if mask is None and causal != always:  # the argument does more than choose the factor
            factors = [
                op.scales((), {**given, "context_length": keys, "is_causal": c})["output"]
                for c in (always, causal)
            ]
            settings, output = settings[:1], factors[0] / factors[1]
        step = Step(op=node.kind, settings=settings, output=(output, output))
        return step, "scaled", f"over {keys} keys" + (", of the past" if always else "")

    def _keys(self, node: Node, seen: int, causal: bool = False) -> tuple[int, bool]:
        """(the number of keys to scale for, whether queries see the past only), always the same."""
        assert node.key is not None
        found = (self.settings.context or seen, causal)
        return self.settings.settled.keys.setdefault(node.key, found)
