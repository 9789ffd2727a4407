"""Custom transforms: rewriting the graphs that `torch.compile` captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fp8.common.validation import check_module

from ..common.calls import Args, Function, Kwargs, T
from .compile import Backend, M, compiled

__all__ = [
    "apply_transform",
    "patch_to_expand_modules",
    "replace_node_with_function",
    "torch_nn_modules_to_user_modules",
]


def apply_transform(
    module: M,
    backend: Backend,
    non_recurse_functions: Sequence[Function] = (),
) -> M:
    """Returns a copy of ``module`` whose graphs are passed through ``backend`` before they run.

    Graphs are those of `torch.compile`; eager code at graph breaks is not included. Other
    transforms of this package are part of the graph, whatever the order, and are kept. Copies and
    pickles made without these transforms drop the backend, as they drop `torch.nn.Module.compile`.

    Args:
        module: the model; it is not changed.
        backend: takes a `torch.fx.GraphModule` of torch functions and example inputs, and returns
            the callable to run, usually the modified graph. Backends run in the order they are
            applied; only the last may return something other than a GraphModule.
            `unit_scaling.transforms.compile` compiles the result.
        non_recurse_functions: functions kept as one call in the graph, for the rest of the process.

    Raises:
        TypeError: ``module`` is not an `nn.Module`.
    """
    check_module("apply_transform", module)
    for function in non_recurse_functions:
        torch.compiler.allow_in_graph(function)
    return compiled(module, backend)


def patch_to_expand_modules(fn: Callable[..., T]) -> Callable[..., T]:
    """Returns ``fn`` unchanged: `torch.compile` expands the modules of `torch.nn` itself."""
    return fn


def replace_node_with_function(
    graph: Graph,
    source: Node,
    target_fn: Function,
    args: Args | None = None,
    kwargs: Kwargs | None = None,
    keep_type_expr: bool = True,
) -> None:
    """Replaces a node of ``graph`` with a call of ``target_fn``.

    Args:
        graph: the graph, changed in place.
        source: the node to replace.
        target_fn: the function to call.
        args: positional arguments; by default the node's.
        kwargs: keyword arguments; by default the node's.
        keep_type_expr: whether to keep the node's type.
    """
    if args is None:
        args = source.args
    if kwargs is None:
        kwargs = source.kwargs
    kind = source.type if keep_type_expr else None
    with graph.inserting_after(source):
        call = graph.call_function(target_fn, args, kwargs, kind)
    source.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
    graph.erase_node(source)


@cache
def _user_class(cls: type[nn.Module]) -> type[nn.Module]:
    name = cls.__module__.removeprefix("torch.nn.").replace(".", "_")
    name = f"trivial_subclass_{name}_{cls.__name__}"
    return type(name, (cls,), {"__module__": __name__})


def torch_nn_modules_to_user_modules(mod: nn.Module) -> None:
    """Changes the class of every `torch.nn` submodule of ``mod`` to a user-defined subclass, in
    place.

    The subclasses add nothing; they are for code that treats modules of torch differently from
    those of the model. ``mod`` itself is not changed, and the modules stay the same objects.
    """
    for child in mod.modules():
        cls: Any = type(child)
        if child is not mod and cls.__module__.startswith(("torch.nn.", "torch.ao.")):
            child.__class__ = _user_class(cls)
