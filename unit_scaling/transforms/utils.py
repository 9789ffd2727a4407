"""Transforms of one's own: rewriting the graphs that torch's compiler makes of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Graph, Node

from fp8.common.mixin import check_module

from .compile import Backend, Compile, with_scope
from .run.install import find_scope

__all__ = [
    "apply_transform",
    "patch_to_expand_modules",
    "replace_node_with_function",
    "torch_nn_modules_to_user_modules",
]

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def apply_transform(
    module: M,
    backend: Backend,
    non_recurse_functions: Sequence[Callable[..., Any]] = (),
) -> M:
    """A copy of ``module`` whose graphs go through ``backend`` before they run.

    backend: gets each graph, a `torch.fx.GraphModule` of torch functions, and example inputs, and
    returns what runs in its place: the graph again, changed. Several transforms follow each other
    in the order in which they are applied; only the last may return something else than a
    GraphModule. `unit_scaling.transforms.compile` compiles what comes out.
    non_recurse_functions: what stays one call in the graph; for the rest of the process.

    Graphs are those of torch.compile: eager code between them, where it breaks them, is not seen.
    Other transforms of this package are in the graph, whatever the order, and keep it; copies and
    pickles made without them drop it, as they do what `torch.nn.Module.compile` did.
    Raises TypeError for what is not a module.
    """
    check_module("apply_transform", module)
    for function in non_recurse_functions:
        torch.compiler.allow_in_graph(function)
    scope = find_scope(module, Compile)
    before, inductor = ((), False) if scope is None else (scope.backends, scope.inductor)
    return with_scope(module, Compile((*before, backend), inductor))


def patch_to_expand_modules(fn: Callable[..., T]) -> Callable[..., T]:
    """``fn`` as it is: torch.compile expands the modules of `torch.nn` by itself."""
    return fn


def replace_node_with_function(
    graph: Graph,
    source: Node,
    target_fn: Callable[..., Any],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[Any, Any] | None = None,
    keep_type_expr: bool = True,
) -> None:
    """Puts a call of ``target_fn`` in the place of a node of ``graph``.

    args, kwargs: those of the call, by default the node's own. keep_type_expr: keep the node's
    type.
    """
    with graph.inserting_after(source):
        call = graph.call_function(
            target_fn,
            source.args if args is None else args,
            source.kwargs if kwargs is None else kwargs,
            source.type if keep_type_expr else None,
        )
    source.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
    graph.erase_node(source)


_USER_CLASSES: dict[type, type] = {}


def torch_nn_modules_to_user_modules(mod: nn.Module) -> None:
    """Gives the modules of `torch.nn` within ``mod``, not itself, a class of the user's, in place.

    A subclass without anything of its own, named after the original: for code that treats torch's
    modules in another way than those of a model. They stay the same objects.
    """
    for child in mod.modules():
        cls = type(child)
        if child is not mod and cls.__module__.startswith(("torch.nn.", "torch.ao.")):
            if cls not in _USER_CLASSES:
                name = cls.__module__.removeprefix("torch.nn.").replace(".", "_")
                name = f"trivial_subclass_{name}_{cls.__name__}"
                _USER_CLASSES.setdefault(cls, type(name, (cls,), {"__module__": __name__}))
            child.__class__ = _USER_CLASSES[cls]
