"""`compile`: a compiled copy of a model, whatever transforms it has or gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8.common.mixin import check_module
from fp8.common.step import unwrapped
from fp8.common.threads import Stack

from ..checks.optimizers import remember_copy
from .capture.copies import deep_copy
from .capture.observe import unseen
from .run.install import Call, Places, find_scope, install

__all__ = ["Backend", "Compile", "compile", "copied", "with_scope"]

M = TypeVar("M", bound=nn.Module)


Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]
"""What `torch.compile` calls a backend: a graph and example inputs in, what computes it out."""


class Compile:
    """Marks a model as compiled, so that copies of it (those of transforms too) are as well.

    backends: what its graphs go through, one after the other. inductor: whether torch's own
    compiler comes last.
    """

    order = 2

    def __init__(self, backends: tuple[Backend, ...] = (), inductor: bool = True) -> None:
        self.path = Stack()
        self.backends = backends
        self.inductor = inductor

    def start(self, model: nn.Module) -> None:
        """Compiles ``model`` in place."""
        if self.backends:
            model.compile(backend=self._compiled)
        else:
            model.compile()

    def _compiled(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        result: Any = graph
        for backend in self.backends:
            if not isinstance(result, GraphModule):
                raise TypeError(f"a backend before {backend} returned no GraphModule for it")
            result = backend(result, inputs)
        result = torch.compile(result) if self.inductor else result

        def run(*args: Any) -> Any:
            with unseen():  # the modes of the transforms are in the graph already
                return result(*args)

        return run

    def inside(self, path: str) -> Places:
        """Nowhere."""
        return ()

    def run(
        self, call: Call, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """``call()``: compiling happens around the whole model, not here."""
        return call()


def compile(module: M) -> M:
    """A copy of ``module`` that runs compiled, with the default backend of `torch.compile`.

    The copy is the same model in every other way. The first call is made eagerly where
    `unit_scale` has yet to see the model run.
    Raises TypeError for what is not a module.
    """
    check_module("compile", module)
    scope = find_scope(module, Compile)
    return with_scope(module, Compile(() if scope is None else scope.backends))


def with_scope(module: M, scope: Compile) -> M:
    """A copy of ``module`` that is compiled as ``scope`` says."""
    result = copied(module, "compile")
    install(result, scope)
    scope.start(unwrapped(result))
    return result


def copied(module: M, transform: str) -> M:
    """A deep copy of a model; a compiled one stays compiled. transform: what returns the copy.

    `copy.deepcopy` alone drops what `nn.Module.compile` did. Raises TypeError for what cannot be
    copied: a function among the attributes that is TorchScript.
    """
    result = deep_copy(module)
    scope = find_scope(result, Compile)
    if scope is not None and unwrapped(result) is result:
        scope.start(result)
    remember_copy(module, result, transform)
    return result
