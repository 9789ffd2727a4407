"""Copies of models where `copy.deepcopy` alone fails or is wrong.

deepcopy fails for a non-leaf tensor that a module keeps from its last call (an attention map), of
which the copy here has the values. It does not copy functions, so that ``self.f = lambda x:
mlp.act(x)`` would call the original's submodules, and drops hooks of parameters. A hook that refers
to a part of the model may store what the forward reads later: it stays in copies for recording.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

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

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has: its parameters, buffers, submodules, hooks."""


def deep_copy(module: M, memo: dict[int, Any] | None = None, hooked: bool = False) -> M:
    """Returns a deep copy of ``module``. memo: id -> object to use instead of a copy. hooked:
    whether parameters keep their hooks. Raises TypeError for a TorchScript module."""
    memo = {} if memo is None else memo
    for path, part in module.named_modules():
        check_not_scripted(path, part)
    hooks = [*_own_hooks(module)]
    closures = _Closures(module, memo)
    seen: set[int] = set()
    for part in module.modules():
        others = _OF_MODULES.union(mixin_attributes(part))
        for value in [v for name, v in vars(part).items() if name not in others]:
            if isinstance(value, FunctionType):
                closures.refers(value)
            for tensor in tensors_within(value, seen):
                if tensor.grad_fn is not None and id(tensor) not in memo:
                    memo[id(tensor)] = tensor.detach().clone()
    for *_, hook in hooks:
        closures.refers(hook)
    result = copy.deepcopy(module, memo)
    for original, name, key, hook in hooks:
        vars(memo[id(original)])[name][key] = closures.own(hook)
    if hooked:
        _hook_parameters(module, closures, memo)
    closures.fill()
    # A class may have copied submodules without memo, by pickling in its __getstate__ (generated
    # code), and so their parameters and transforms.
    for path, original in module.named_modules():
        owner, _, name = path.rpartition(".")
        if id(original) not in memo and name in (made := result.get_submodule(owner)._modules):
            made[name] = copy.deepcopy(original, memo)
    return result


def _hook_parameters(module: nn.Module, closures: _Closures, memo: dict[int, Any]) -> None:
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
                register(closures.own(hook))
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
    """Copies, in the memo of `copy.deepcopy`, of the functions that refer to a part of a model in
    their closure or defaults."""

    def __init__(self, module: nn.Module, memo: dict[int, Any]) -> None:
        self._parts = {id(part) for part in (*module.modules(), *module.parameters())}
        self._memo = memo
        self._refers: dict[int, bool] = {}
        self._functions: list[FunctionType] = []

    def refers(self, value: Any) -> bool:
        """Whether a value refers to a part. The functions that do have copies from now on, with
        empty closures."""
        key = id(value)
        if key in self._parts or key in self._refers:
            return self._refers.get(key, True)
        self._refers[key] = False  # a function may refer to itself
        self._refers[key] = any([self.refers(each) for each in _references(value)])  # noqa: C419
        if self._refers[key] and isinstance(value, FunctionType) and key not in self._memo:
            cells = tuple(CellType() for _ in value.__closure__ or ())
            name, names = value.__name__, value.__globals__
            self._memo[key] = FunctionType(value.__code__, names, name, closure=cells)
            self._functions.append(value)
        return self._refers[key]

    def own(self, value: Any) -> Any:
        """A value for the copy: itself unless it refers to a part."""
        if not self.refers(value):
            return value
        if isinstance(value, partial):
            named = {name: self.own(item) for name, item in value.keywords.items()}
            return partial(self.own(value.func), *map(self.own, value.args), **named)
        return copy.deepcopy(value, self._memo)

    def fill(self) -> None:
        """Gives the copies their closures and defaults, with the copies of parts."""
        for function in self._functions:
            made = self._memo[id(function)]
            for cell, mine in zip(function.__closure__ or (), made.__closure__ or (), strict=True):
                mine.cell_contents = self.own(_contents(cell))
            made.__defaults__ = self.own(function.__defaults__)
            made.__kwdefaults__ = self.own(function.__kwdefaults__)
            made.__dict__.update(vars(function))
