"""The interior of a model: the calls whose values a plan may scale.

A call is interior if its value depends on parameters and feeds a layer, that is a product with a
weight. Everything else keeps its values: the inputs of the model and what is computed from them,
its results, its losses and all operations after its last layer. A submodule, or a model without
layers, is assumed to have layers around it: all of it is interior.
"""

from __future__ import annotations

from ..capture.dataflow import Flow
from ..capture.kinds import EMBEDDINGS


class Interior:
    """The interior calls of a flow. whole: whether the flow is of a whole model."""

    def __init__(self, flow: Flow, whole: bool) -> None:
        nodes = flow.nodes
        learned = [any(nodes[i.node].computed for i in node.inputs) for node in nodes]
        layers = {
            index
            for index, node in enumerate(nodes)
            if flow.is_layer(index) or (learned[index] and node.kind in EMBEDDINGS)
        }
        above = [False] * len(nodes)
        for index, sources in enumerate(flow.sources):
            above[index] = learned[index] or any(above[source] for source in sources)
        below = flow.before(layers)
        part = not (whole and layers)
        self.calls = {i for i in range(len(nodes)) if part or (above[i] and below[i])}
        #: For each node, whether its result feeds a layer.
        self.feeds_layers = below

    def __contains__(self, index: int) -> bool:
        return index in self.calls
