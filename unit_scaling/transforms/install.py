"""Installs transforms on a model without changing its identity.

The class of every submodule is replaced by a subclass whose ``forward`` runs through the module's
*scopes* (one for unit scaling, one for simulation) before the original. The model keeps its type,
names, parameters, hooks and signature. Every entry point runs transformed: the model, a submodule,
its own methods, a copy, an unpickled copy, a compiled model.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from fp8.common.compiler import eager_only, taken_as_constant
from fp8.common.dtensor import is_dtensor
from fp8.common.mixin import Mixin, add_mixin, bare_class, check_not_scripted, remove_mixin
from fp8.common.pitfalls import PitfallWarning, warn_once
from fp8.common.step import unwrapped
from fp8.common.threads import Stack

from ..parameter import forget_tags
from .state import Marked, PlanState, scaling

Call = Callable[..., Any]
"""A module's forward: ``call()`` uses the original arguments, ``call((args, kwargs))`` others."""


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Given = tuple[Args, Kwargs]
"""The positional and the keyword arguments of a call."""


class Scope(Protocol):
    """One transform of one model. By default it wraps nothing, and only marks the model. order:
    scopes are entered in ascending order. path: the names of the modules that are running in this
    thread, outermost first; empty while the transform is not active. each: whether every module
    runs through the scope, not the outermost one alone. named: whether ``path`` has the names of
    inner modules too."""

    order: int
    path: Stack
    each: bool = False
    named: bool = True

    def run(self, call: Call, module: nn.Module, path: str, given: Given) -> Any:
        """Returns ``call()``, the forward of ``module``, with the transform active."""
        return call()


class _Transformed(Mixin, Marked):
    """Base of the generated classes. Each instance holds its scopes and its name in each."""

    _attributes = ("_scopes", "mup_tags")

    @property
    def fp8_unit_scaled(self) -> bool:  # type: ignore[override]
        """Whether its original class is one of unit_scaling, or a scope has ``unit_scaled``."""
        own = bool(getattr(bare_class(self), "fp8_unit_scaled", False))
        return own or scaling(self)[0] is not None

    def fp8_planned_scales(self) -> dict[str, Tensor]:
        """Read by `fp8.calibrate`: the static scales of the gradients that the plan of this model
        casts, by product; none for a submodule."""
        scopes = [s for s, path in self._scopes if not path and hasattr(s, "gradients")]
        return scopes[0].gradients.named() if scopes else {}

    def extra_repr(self) -> str:
        """That of the module, and the transforms of which it is the root."""
        own = cast("nn.Module", super()).extra_repr()
        titles = [getattr(scope, "title", "") for scope, path in self._scopes if not path]
        return ", ".join(filter(None, [own, *titles]))

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the forward through the scopes, with few nested calls: the compiler adds dozens of
        frames for each call, and Python's limit is 1000."""
        scopes = self._scopes
        if len(scopes) == 1 and not scopes[0][0].each:
            scope, path = scopes[0]
            names = scope.path.items
            if names and not scope.named:
                return forward(*args, **kwargs)
            if names:
                names.append(path)
                try:
                    return forward(*args, **kwargs)
                finally:
                    names.pop()
        return _run(self, forward, scopes, (args, kwargs))

    @taken_as_constant
    def _asks(self, scope: int, module: int, question: str, *about: Any) -> Any:
        """The result of a method of a scope for this module, as a constant of the graph. scope,
        module: the ``id`` of the scope and of the module itself, by which torch.compile guards on
        their identity; the objects themselves are no constants in torch 2.11."""
        own, path = next(item for item in self._scopes if id(item[0]) == scope)
        return getattr(own, question)(self, path, *about)

    @taken_as_constant
    def _tracing(self, begins: bool) -> bool:
        """Notes that a graph of the forward pass is begun, or is whole."""
        (_BEGUN.add if begins else _BEGUN.discard)(self)
        return begins


def _run(
    module: Any, forward: Callable[..., Any], scopes: tuple[tuple[Any, str], ...], given: Given
) -> Any:
    if not scopes:
        args, kwargs = given
        return forward(*args, **kwargs)
    (scope, path), inner = scopes[0], scopes[1:]
    names = scope.path.items
    if names and not scope.each:
        if not scope.named:
            return _run(module, forward, inner, given)
        names.append(path)
        try:
            return _run(module, forward, inner, given)
        finally:
            names.pop()

    def call(given: Given = given) -> Any:
        return _run(module, forward, inner, given)

    return scope.run(call, module, path, given)


_BEGUN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules of which torch.compile has begun a graph, and has not finished it."""


def warn_of_break(module: nn.Module) -> None:
    """Warns if torch.compile has left the forward pass of a module to eager mode."""
    if module in _BEGUN:
        _BEGUN.discard(module)
        warn_once(
            PitfallWarning,
            f"torch.compile cannot compile the forward pass of this {type(module).__name__} in one "
            "piece (a graph break), and its transforms need one: all of it runs in eager mode. "
            "fullgraph=True shows where it breaks",
            about=module,
            key="graph break",
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has sharded a submodule, or parallelize_module has divided a parameter."""
    divided = is_in_fsdp(model) or is_flattened(model)
    return divided or any(map(is_dtensor, model.parameters()))


def is_flattened(model: nn.Module) -> bool:
    """Whether FullyShardedDataParallel has flattened a parameter."""
    return any(getattr(p, "_fsdp_flattened", False) for p in model.parameters())


def is_in_fsdp(model: nn.Module) -> bool:
    """Whether FSDP has sharded a submodule, which then has no copy."""
    gathers = ("unshard", "summon_full_params")
    return any(hasattr(child, name) for child in model.modules() for name in gathers)


def find_scope(model: nn.Module, kind: type) -> Any:
    """The model's scope of a type, or None."""
    scopes = getattr(unwrapped(model), "_scopes", ())
    return next((scope for scope, _ in scopes if isinstance(scope, kind)), None)


class _Edits:
    """count: how often a module of the process was given a part. seen: the count at the latest look
    of each scope."""

    count = 0
    seen: ClassVar[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()


@cache
def _count_edits() -> None:
    @eager_only()
    def noted(module: nn.Module, name: str, part: nn.Module | None) -> None:
        _Edits.count += 1

    register_module_module_registration_hook(noted)


def edited(scope: Scope) -> bool:
    """Whether models may have been edited since this was asked for the scope."""
    _count_edits()
    count = _Edits.count
    if _Edits.seen.get(scope) == count:
        return False
    _Edits.seen[scope] = count
    return True


def install(model: nn.Module, scope: Scope, prefix: str = "", only_new: bool = False) -> None:
    """Installs the scope on every module of ``model``, replacing any other of the same type.

    prefix: the name of ``model`` in the scope. only_new: leaves modules as they are that have one
    of the type; others get names that none of them has. Raises TypeError for a TorchScript module,
    which has no Python forward, and for a model whose forward is a generator or a coroutine.
    """
    forward = inspect.unwrap(unwrapped(model).forward)
    is_generator = inspect.isgeneratorfunction(forward) or inspect.isasyncgenfunction(forward)
    if is_generator or inspect.iscoroutinefunction(forward):
        raise TypeError(
            f"the forward of {type(unwrapped(model)).__name__} goes on after its call, where no "
            "transform is in force: let it return a value, and yield or await around the model"
        )
    taken = {n for m in model.modules() for s, n in getattr(m, "_scopes", ()) if s is scope}
    for path, module in unwrapped(model).named_modules(prefix=prefix):
        if unwrapped(module) is not module:
            continue  # a wrapper of torch.compile; the wrapped module follows
        if only_new and find_scope(module, type(scope)) is not None:
            continue
        check_not_scripted(path, module)
        while path in taken:
            path += "'"
        add_mixin(module, _Transformed)
        gained: Any = module
        kept = [item for item in gained._scopes if type(item[0]) is not type(scope)]
        gained._scopes = tuple(sorted([*kept, (scope, path)], key=lambda item: item[0].order))
        _keep_plan(gained)


def _keep_plan(module: Any) -> None:
    """Stores the plan in the state_dict of a model whose weights are scaled, not of submodules."""
    scope, path = scaling(module)
    store = scope is not None and not path
    (add_mixin if store else remove_mixin)(module, PlanState)


def uninstall(model: nn.Module, kind: type) -> None:
    """Removes the scope of a type from every module of ``model``. Modules without any scope left
    get their original class back and lose the tags of their parameters."""
    for module in unwrapped(model).modules():
        if not isinstance(module, _Transformed):
            continue
        module._scopes = tuple(item for item in module._scopes if not isinstance(item[0], kind))
        _keep_plan(module)
        if not module._scopes:
            remove_mixin(module, _Transformed)
            del module._scopes
            forget_tags(module)


def is_exported() -> bool:
    """Whether `torch.export` traces the model. In torch 2.11, is_exporting is true for every graph
    that the compiler traces."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
