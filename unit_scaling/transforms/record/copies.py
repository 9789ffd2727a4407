"""Copies of models where `copy.deepcopy` alone fails or is wrong.

deepcopy fails for a non-leaf tensor that a module keeps from its last call (an attention map): the
copy here holds its values without the autograd graph. deepcopy does not copy functions, so that
``self.f = lambda x: mlp.act(x)`` would call the original's submodules, and drops hooks of
parameters. A hook that refers to a part of the model (a bound method, a closure) may store what the
forward reads later: copies made for recording keep these hooks and no others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from fp8.common.mixin import check_not_scripted, mixin_attributes
from fp8.common.step import tensors_within

M = TypeVar("M", bound=nn.Module)

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def deep_copy(module: M, memo: dict[int, Any] | None = None, hooked: bool = False) -> M:
    """Returns a deep copy of ``module``. memo: id -> object to use instead of a copy. hooked:
    whether its parameters have the hooks of the original's. Raises TypeError for a TorchScript
    function among the attributes, whose parts are hidden."""
    memo = {} if memo is None else memo
    _refuse_scripted(module)
    hooks = [*_own_hooks(module)]
    closures = _Closures(module)
    seen: set[int] = set()
    for part in module.modules():
        values = [value for _, value in own_attributes(part)]
        closures.copy_functions([v for v in values if isinstance(v, FunctionType)], memo)
        for tensor in (t for value in values for t in tensors_within(value, seen)):
            if tensor.grad_fn is not None and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
    closures.copy_functions([hook for *_, hook in hooks], memo)
    result = copy.deepcopy(module, memo)
    for original, name, key, hook in hooks:
        vars(memo[id(original)])[name][key] = closures.own(hook, memo)
    if hooked:
        _hook_parameters(module, closures, memo)
    closures.fill(memo)
    # A class may have copied submodules without memo, by pickling in its __getstate__ (generated
    # code), and so their parameters and transforms.
    for path, original in module.named_modules():
        owner, _, name = path.rpartition(".")
        if id(original) not in memo and name in (made := result.get_submodule(owner)._modules):
            made[name] = copy.deepcopy(original, memo)
    return result


def _hook_parameters(module: nn.Module, closures: _Closures, memo: dict[int, Any]) -> None:
    """Registers the hooks of parameters at their copies."""
    for parameter in module.parameters():
        copied = memo.get(id(parameter), parameter)
        if copied is parameter:
            continue
        trained = copied.requires_grad
        for name, register in (
            ("_backward_hooks", copied.register_hook),
            ("_post_accumulate_grad_hooks", copied.register_post_accumulate_grad_hook),
        ):
            for hook in (getattr(parameter, name, None) or {}).values():
                copied.requires_grad_()
                register(closures.own(hook, memo))
        copied.requires_grad_(trained)


def recording_copy(module: M, hooked: bool = False) -> M:
    """Returns a copy that shares the parameters and the transforms of ``module``, has its own
    buffers, and only the hooks that belong to the model; hooked: all hooks."""
    shared: dict[int, Any] = {id(p): p for p in module.parameters()}
    for child in module.modules():
        shared.update({id(scope): scope for scope, _ in getattr(child, "_scopes", ())})
        hooks = [] if hooked else [getattr(child, name) for name in _HOOKS]
        shared.update({id(dictionary): type(dictionary)() for dictionary in hooks})
    return deep_copy(module, shared)


_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has: its parameters, buffers, submodules, hooks."""


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module beside those of every module and those of transforms."""
    others = _OF_MODULES.union(mixin_attributes(module))
    return ((name, value) for name, value in vars(module).items() if name not in others)


def _refuse_scripted(model: nn.Module) -> None:
    for path, module in model.named_modules():
        check_not_scripted(path, module)
        for name, value in vars(module).items():
            if isinstance(value, torch.jit.ScriptFunction):
                place = f"{path}.{name}" if path else name
                raise TypeError(f"{place!r} is a TorchScript function: use the one it was made of")


def _own_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, str, int, Any]]:
    """(module, dictionary, key, value) of the hooks that belong to the model."""
    parts = {id(part) for part in model.modules()}
    for module in model.modules():
        hooks = [(n, *item) for n in _HOOKS for item in vars(module).get(n, {}).items()]
        keys = {key for name, key, hook in hooks if name in _HOOKS[:2] and _belongs(hook, parts)}
        yield from ((module, name, key, hook) for name, key, hook in hooks if key in keys)


def package_of(function: Any) -> str:
    """The package that defines a function or a class."""
    module: str = getattr(getattr(function, "func", function), "__module__", None) or ""
    return module.partition(".")[0]


def _belongs(hook: Any, parts: set[int]) -> bool:
    """Whether a hook belongs to the model with these parts."""
    if isinstance(hook, MethodType):
        return id(hook.__self__) in parts
    # not in lists: those may hold results of calls
    refers = isinstance(hook, FunctionType) and any(id(v) in parts for v in _references(hook))
    return refers or isinstance(hook, BasePruningMethod)


def _references(value: Any) -> list[Any]:
    """What a function, a method, a partial or a container refers to."""
    if isinstance(value, FunctionType):
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


class _Closures:
    """Copies of the functions that refer to a part of a model in their closure or defaults, which
    `copy.deepcopy` takes from its memo."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = {id(part) for part in (*module.modules(), *module.parameters())}
        self._refers: dict[int, bool] = {}
        self._functions: list[FunctionType] = []

    def copy_functions(self, values: list[Any], memo: dict[int, Any]) -> bool:
        """Adds copies of the functions that ``values`` hold to ``memo``, with empty closures.
        Returns whether one of the values refers to a part."""
        return any([self._copied(value, memo) for value in values])  # noqa: C419 - all of them

    def _copied(self, value: Any, memo: dict[int, Any]) -> bool:
        key = id(value)
        if key in self._parts or key in self._refers:
            return self._refers.get(key, True)
        self._refers[key] = False  # a function may refer to itself
        self._refers[key] = self.copy_functions(_references(value), memo)
        if self._refers[key] and isinstance(value, FunctionType) and key not in memo:
            cells = tuple(CellType() for _ in value.__closure__ or ())
            name, names = value.__name__, value.__globals__
            memo[key] = FunctionType(value.__code__, names, name, closure=cells)
            self._functions.append(value)
        return self._refers[key]

    def own(self, value: Any, memo: dict[int, Any]) -> Any:
        """A value for the copy: itself unless it refers to a part."""
        if not self.copy_functions([value], memo):
            return value
        if isinstance(value, partial):
            named = {name: self.own(item, memo) for name, item in value.keywords.items()}
            args = (self.own(item, memo) for item in value.args)
            return partial(self.own(value.func, memo), *args, **named)
        return copy.deepcopy(value, memo)

    def fill(self, memo: dict[int, Any]) -> None:
        """Gives the copies their closures and defaults, with the copies of parts."""
        for function in self._functions:
            made = memo[id(function)]
            for cell, mine in zip(function.__closure__ or (), made.__closure__ or (), strict=True):
                mine.cell_contents = self.own(_contents(cell), memo)
            made.__defaults__ = self.own(function.__defaults__, memo)
            made.__kwdefaults__ = self.own(function.__kwdefaults__, memo)
            made.__dict__.update(vars(function))
