"""Installs transforms on a model without changing its identity.

The class of every submodule is replaced by a subclass whose ``forward`` runs through the module's
*scopes* (one for simulation, one for compilation) before the original. The model keeps its type,
names, parameters, hooks and signature. Every entry point runs transformed, also of a copy.
`unit_scale` needs none of this: the model that it returns is a plain one.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fp8.common.dtensor import is_dtensor
from fp8.common.mixin import Mixin, add_mixin
from fp8.common.step import unwrapped
from fp8.frame import Stack
from fp8.torch_internals.stance import outside_compiler

from ..common.calls import Args, Function, Given, Kwargs

S = TypeVar("S")

Call = Function
"""A module's forward: ``call()`` uses the original arguments, ``call((args, kwargs))`` others."""


class Scope:
    """One transform of one model, which runs the whole model under a torch-function mode, in eager
    code and in graphs alike. order: scopes are entered in ascending order. path: has an item while
    the mode is active in this thread."""

    order: int

    def __init__(self) -> None:
        self.path = Stack()

    @property
    def runs(self) -> bool:
        """Whether the next module runs through it: the outermost one, which may be a part."""
        return not self.path.items

    def mode(self) -> AbstractContextManager[object]:
        """A new mode for a call of the model."""
        raise NotImplementedError

    def run(
        self,
        call: Call,
        module: nn.Module,
        path: str,
        given: Given,
        is_eager: bool = False,
    ) -> object:
        """Returns ``call()``, the forward of ``module``, with the transform active. is_eager:
        whether this runs outside the compiler already.

        Not a with statement: a graph break inside one is resumed in pieces, each compiled while the
        mode is active. Inside try, a graph break leaves the whole frame to eager mode.
        """
        # Per thread: `is_compiling` is true in all threads while one compiles (torch 2.13). Inline:
        # a helper function would be compiled itself, to True.
        traced = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        if not (is_eager or traced):  # also after a graph break
            return outside_compiler(lambda: self.run(call, module, path, given, True))
        mode = self.mode()
        self.path.items.append(path)
        mode.__enter__()
        try:
            return call()
        finally:
            mode.__exit__(None, None, None)
            self.path.items.pop()


class _Transformed(Mixin, nn.Module):
    """Base of the generated classes. Each instance holds its scopes and its name in each."""

    _attributes = ("_scopes", "mup_tags")
    _scopes: tuple[tuple[Scope, str], ...] = ()

    def extra_repr(self) -> str:
        own = cast("nn.Module", super()).extra_repr()
        titles = [
            getattr(scope, "title", "") for scope, path in self._scopes if not path
        ]
        return ", ".join(filter(None, [own, *titles]))

    def around(
        self,
        forward: Function,
        args: Args,
        kwargs: Kwargs,
        scopes: tuple[tuple[Scope, str], ...] | None = None,
    ) -> object:
        """Runs the forward through the scopes. Few nested calls: the compiler adds dozens of frames
        for each, and Python's limit is 1000."""
        if scopes is None:
            scopes = self._scopes
        while scopes and not scopes[0][0].runs:
            scopes = scopes[1:]
        if not scopes:
            return forward(*args, **kwargs)
        (scope, path), *others = scopes

        def call(given: Given = (args, kwargs)) -> object:
            return _Transformed.around(self, forward, *given, tuple(others))

        return scope.run(call, self, path, (args, kwargs))


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has sharded a submodule or flattened a parameter, or parallelize_module has
    divided one."""
    if is_in_fsdp(model):
        return True
    divided = (
        is_dtensor(p) or hasattr(p, "_fsdp_flattened") for p in model.parameters()
    )
    return any(divided)


def is_in_fsdp(model: nn.Module) -> bool:
    """Whether FSDP has sharded a submodule, which then has no copy."""
    gathers = ("unshard", "summon_full_params")
    return any(hasattr(child, name) for child in model.modules() for name in gathers)


def find_scope(model: nn.Module, kind: type[S]) -> S | None:
    """The model's scope of a type, or None."""
    scopes = getattr(unwrapped(model), "_scopes", ())
    return next((scope for scope, _ in scopes if isinstance(scope, kind)), None)


def install(model: nn.Module, scope: Scope) -> None:
    """Installs the scope on every module of a `deep_copy`, replacing any other of the same type.
    Raises TypeError for a model whose forward is a generator or a coroutine."""
    model = unwrapped(model)
    forward = inspect.unwrap(model.forward)
    goes_on = (
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
        inspect.iscoroutinefunction,
    )
    if any(question(forward) for question in goes_on):
        raise TypeError(
            f"the forward of {type(model).__name__} goes on after its call, where no "
            "transform is in force: let it return a value, and yield or await around the model"
        )
    for path, module in model.named_modules():
        if unwrapped(module) is not module:
            continue  # a wrapper of torch.compile; the wrapped module follows
        add_mixin(module, _Transformed)
        gained: Any = module
        kept = [item for item in gained._scopes if type(item[0]) is not type(scope)]
        kept.append((scope, path))
        gained._scopes = tuple(sorted(kept, key=lambda item: item[0].order))
