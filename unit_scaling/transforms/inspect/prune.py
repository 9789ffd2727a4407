"""Prunes uninformative nodes from graphs of `track_scales`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .metrics import Metrics


def prune_non_float_tensors(graph: Graph) -> Graph:
    """Returns a copy of a graph of `track_scales` without nodes that are not floating-point
    tensors.

    A reader of such a node gets its one floating-point input instead, or None if it has none or
    several.

    Raises:
        TypeError: ``graph`` is not a `torch.fx.Graph`.
        ValueError: the graph was not made by `track_scales`.
    """
    return _pruned(graph, lambda node: not _is_float(node))


def prune_same_scale_tensors(graph: Graph, rtol: float = 2**-16) -> Graph:
    """Returns a copy of a graph of `track_scales` without nodes of the same scale as their input.

    Such nodes (views, casts) have one floating-point input with the same mean absolute value, and
    the same mean absolute gradient if there is one. Their readers get the input instead.

    Args:
        graph: a graph of `track_scales`.
        rtol: the allowed relative difference; slices change the mean slightly.

    Raises:
        TypeError: ``graph`` is not a `torch.fx.Graph`.
        ValueError: the graph was not made by `track_scales`.
    """

    def same(node: Node) -> bool:
        source = _float_input(node)
        if source is None or not _is_float(node):
            return False
        a, b = source.meta["metrics"], node.meta["metrics"]
        return _close(a.fwd, b.fwd, rtol) and _close(a.bwd, b.bwd, rtol)

    return _pruned(graph, same)


def prune_selected_nodes(graph: Graph, targets: Iterable[Callable[..., Any] | str]) -> Graph:
    """Returns a copy of a graph without the nodes that call one of ``targets``. Their readers get
    other arguments as in `prune_non_float_tensors`.

    Args:
        graph: any graph.
        targets: functions, or names of methods.

    Raises:
        TypeError: ``graph`` is not a `torch.fx.Graph`.
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
    """The only floating-point input of a node; None if there are none or several."""
    found = [source for source in node.all_input_nodes if _is_float(source)]
    return found[0] if len(found) == 1 else None


def _close(a: Metrics.Data | None, b: Metrics.Data | None, rtol: float) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a.mean_abs, b.mean_abs, rel_tol=rtol)
