"""Calls that select: products with one-hot rows, and distances for an argmin.

A product with one-hot rows (letters, codes) is a table lookup. Each entry of its result is one
entry of the weight, not a sum over fan-in, and each row of the weight receives only its share of
the gradient. Such rows are therefore scaled to RMS 1, like other values.

A decomposed distance, ``a**2 + b**2 - 2 * a @ b.T``, sums scaled and unscaled terms. If it is used
only by an argmin, it keeps its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..capture.dataflow import Flow
from ..capture.kinds import RECURRENT
from ..capture.record import CallGraph, CallNode
from .actions import Scaling

__all__ = ["DISTANCE", "consumers", "distances", "one_hot"]

DISTANCE = "in a distance whose argmin is taken: keeps its values"
"""The reason shown in the report."""

_CHANNELS = frozenset("conv1d conv2d conv3d".split())
_ROWS = RECURRENT | frozenset("linear matmul mm".split())


def one_hot(flow: Flow, node: CallNode) -> tuple[Scaling, ...]:
    """Factors for the one-hot first argument of a product."""
    if node.kind not in _CHANNELS | _ROWS:
        return ()
    slot, first = next(iter(node.tensors.items()))
    source = node.inputs[0].node
    if flow.nodes[source].computed or flow.nodes[source].live != flow.data[source]:
        return ()  # a weight, or computed from one
    dim = 1 if node.kind in _CHANNELS else -1
    if first.dim() < 2 or first.shape[dim] < 2 or not _is_one_hot(first, dim):
        return ()
    factor = float(first.shape[dim]) ** 0.5
    return ((slot, factor, factor),)


@torch.no_grad()
def _is_one_hot(tensor: Tensor, dim: int) -> bool:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
        return False
    ones = tensor == 1
    return bool((ones.sum(dim) == 1).all()) and bool((ones | (tensor == 0)).all())


def distances(readers: Sequence[Mapping[int, str]]) -> set[int]:
    """The calls whose results are used only by an argmin. readers: as returned by `consumers`."""
    found: set[int] = set()
    for index in reversed(range(len(readers))):
        kinds = {kind for reader, kind in readers[index].items() if reader not in found}
        if readers[index] and kinds <= {"argmin"}:
            found.add(index)
    return found


def consumers(graph: CallGraph) -> list[dict[int, str]]:
    """For each node, the calls that read it, as an index too, and their kinds."""
    readers: list[dict[int, str]] = [{} for _ in graph.nodes]
    for index, node in enumerate(graph.nodes):
        for i in node.inputs:
            readers[i.node][index] = node.kind
    return readers
