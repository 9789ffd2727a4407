"""Graphs of `track_scales` without the nodes that say nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .metrics import Metrics

__all__ = ["prune_non_float_tensors", "prune_same_scale_tensors", "prune_selected_nodes"]


def prune_non_float_tensors(graph: Graph) -> Graph:
    """A copy of a graph of `track_scales` without the nodes that are not a floating-point tensor.

    What reads such a node reads its one floating-point input instead, or None where it has none or
    several.
    Raises ValueError for a graph that `track_scales` has not made, TypeError for what is no graph.
    """
    return _pruned(graph, lambda node: not _is_float(node))


def prune_same_scale_tensors(graph: Graph, rtol: float = 2**-16) -> Graph:
    """A copy of a graph of `track_scales` without nodes of the scale of their input: views, casts.

    Such a node has one floating-point input, and the mean absolute value of both, and of both
    gradients if there are any, is the same, up to the relative difference ``rtol`` (slices change
    it slightly). What reads it reads its input instead.
    Raises ValueError for a graph that `track_scales` has not made, TypeError for what is no graph.
    """

    def same(node: Node) -> bool:
        source = _float_input(node)
        if source is None or not _is_float(node):
            return False
        a, b = source.meta["metrics"], node.meta["metrics"]
        return _close(a.fwd, b.fwd, rtol) and _close(a.bwd, b.bwd, rtol)

    return _pruned(graph, same)


def prune_selected_nodes(graph: Graph, targets: Iterable[Callable[..., Any] | str]) -> Graph:
    """A copy of a graph without the nodes that call one of ``targets``.

    targets: functions, or names of methods. What reads such a node reads its one floating-point
    input instead, or None where it has none or several. Raises TypeError for what is no graph.
    """
    chosen = list(targets)
    return _pruned(graph, lambda node: node.target in chosen, tracked=False)


def _pruned(graph: Graph, prune: Callable[[Node], bool], tracked: bool = True) -> Graph:
    if not isinstance(graph, Graph):
        raise TypeError(
            f"graph is a torch.fx.Graph, as of scales_graph(), got {type(graph).__name__}"
        )
    nodes = list(graph.nodes)
    if tracked and any("outputs_float_tensor" not in node.meta for node in nodes):
        raise ValueError("the graph is not one of track_scales: its nodes have no metrics")
    graph = copy.deepcopy(graph)
    for node in graph.nodes:
        if node.op != "output" and prune(node):
            _remove(graph, node)
    graph.lint()
    return graph


def _remove(graph: Graph, node: Node) -> None:
    source = _float_input(node)

    def without(argument: Node) -> Any:
        return source if argument is node else argument

    for user in list(node.users):
        user.args = map_arg(user.args, without)
        user.kwargs = map_arg(user.kwargs, without)
    graph.erase_node(node)


def _is_float(node: Node) -> bool:
    return bool(node.meta.get("outputs_float_tensor", False))


def _float_input(node: Node) -> Node | None:
    """The floating-point tensor that a node reads, if it is only one."""
    found = [source for source in node.all_input_nodes if _is_float(source)]
    return found[0] if len(found) == 1 else None


def _close(a: Metrics.Data | None, b: Metrics.Data | None, rtol: float) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a.mean_abs, b.mean_abs, rel_tol=rtol)
