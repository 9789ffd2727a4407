"""`compile`: a compiled copy of a model, before or after any other transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8.common.copies import deep_copy
from fp8.common.step import unwrapped
from fp8.common.validation import check_module

from ..checks.optimizers import remember_copy
from ..common.calls import Function
from .install import Scope, find_scope, install, is_in_fsdp
from .record.probe import unseen

M = TypeVar("M", bound=nn.Module)


Backend = Callable[[GraphModule, list[Tensor]], Function]
"""A `torch.compile` backend: takes a graph and example inputs, returns a callable."""


class Compile(Scope):
    """Marks a model as compiled, so that copies are as well. backends: applied to each graph, in
    order. inductor: whether `torch.compile` compiles the result."""

    order = 2
    runs = False

    def __init__(self, backends: Sequence[Backend] = (), inductor: bool = False):
        self.backends = backends
        self.inductor = inductor

    def start(self, model: nn.Module) -> None:
        model.compile(backend=self._compiled if self.backends else "inductor")

    def _compiled(self, graph: GraphModule, inputs: list[Tensor]) -> Function:
        result: Function = graph
        for backend in self.backends:
            if not isinstance(result, GraphModule):
                raise TypeError(
                    f"a backend before {backend} returned no GraphModule for it"
                )
            result = backend(result, inputs)
        if self.inductor:
            result = torch.compile(result)

        def run(*args: object) -> object:
            with unseen():  # the graph already contains the transforms' modes
                return result(*args)

        return run


def compile(module: M) -> M:
    """Returns a copy of ``module`` compiled with the default backend of `torch.compile`.

    The first call runs eagerly if it sets the values of a model of `unit_scale`.

    Args:
        module: the model; it is not changed.

    Returns:
        A compiled model of the same class.

    Raises:
        TypeError: ``module`` is not an `nn.Module`.
    """
    check_module("compile", module)
    return compiled(module, inductor=True)


def compiled(module: M, *backends: Backend, inductor: bool = False) -> M:
    """Returns a copy of ``module`` that is compiled with further backends."""
    before = find_scope(module, Compile) or Compile()
    scope = Compile((*before.backends, *backends), inductor or before.inductor)
    result = copied(module, "compile")
    install(result, scope)
    scope.start(unwrapped(result))
    return result


def copied(module: M, transform: str) -> M:
    """Returns a `deep_copy` of a model, compiled if that is. transform: the name of the caller.
    Raises ValueError for a model in FSDP."""
    if is_in_fsdp(module):
        raise ValueError(
            f"{transform} copies the model, which FSDP has sharded: call it before fully_shard"
        )
    result = deep_copy(module, parameter_hooks=True)
    # Copies of torch drop what `nn.Module.compile` has set.
    scope = find_scope(result, Compile)
    if scope is not None and unwrapped(result) is result:
        scope.start(result)
    remember_copy(module, result, transform)
    return result
