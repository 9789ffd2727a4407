"""Copies of a model where `copy.deepcopy` alone fails or is wrong.

deepcopy fails for a non-leaf tensor that a module keeps from its last call (an attention map): the
copy here holds its values without the autograd graph. deepcopy does not copy functions:
``self.f = lambda x: mlp.act(x)`` of a copy would call the original's submodules. It drops the hooks
of parameters, such as one that masks a gradient.

A hook that refers to a part of the model (a bound method, a closure) belongs to the model: it may
store what the forward reads later. So does one of the library that the class of its module is from.
Copies made for recording keep these hooks and no others.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from fp8.common.mixin import bare_class, mixin_attributes
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
    parts = {id(part) for part in (*module.modules(), *module.parameters())}
    functions = list(_functions(module, parts))
    seen: set[int] = set()
    for part in module.modules():
        kept = (t for _, value in own_attributes(part) for t in tensors_within(value, seen))
        left = {id(t): t for t in kept if t.grad_fn is not None and id(t) not in memo}
        memo.update({key: t.detach().clone() for key, t in left.items()})
    result = copy.deepcopy(module, memo)
    for owner, name, function in functions:
        vars(memo[id(owner)])[name] = _of_copy(function, parts, memo)
    for original, name, key, hook in _own_hooks(module):
        vars(memo[id(original)])[name][key] = _of_copy(hook, parts, memo)
    if hooked:
        _hook_parameters(module, parts, memo)
    # A class may have copied submodules without memo, by pickling in its __getstate__ (generated
    # code), and so their parameters and transforms.
    for path, original in module.named_modules():
        owner, _, name = path.rpartition(".")
        if id(original) not in memo and name in (made := result.get_submodule(owner)._modules):
            made[name] = copy.deepcopy(original, memo)
    return result


def _hook_parameters(module: nn.Module, parts: set[int], memo: dict[int, Any]) -> None:
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
                register(_own(hook, parts, memo))
        copied.requires_grad_(trained)


def recording_copy(module: M) -> M:
    """Returns a copy that shares the parameters and the transforms of ``module``, has its own
    buffers, and only the hooks that belong to the model."""
    shared: dict[int, Any] = {id(p): p for p in module.parameters()}
    for child in module.modules():
        shared.update({id(scope): scope for scope, _ in getattr(child, "_scopes", ())})
        hooks = [getattr(child, name) for name in _HOOKS]
        shared.update({id(dictionary): type(dictionary)() for dictionary in hooks})
    return deep_copy(module, shared)


_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has: its parameters, buffers, submodules, hooks."""


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module beside those of every module and those of transforms."""
    others = _OF_MODULES.union(mixin_attributes(module))
    return ((name, value) for name, value in vars(module).items() if name not in others)


def _functions(model: nn.Module, parts: set[int]) -> Iterator[tuple[nn.Module, str, FunctionType]]:
    """(owner, name, function) of attributes that are functions and refer to a part of the model."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.jit.ScriptFunction):
                place = f"{path}.{name}" if path else name
                raise TypeError(f"{place!r} is a TorchScript function: use the one it was made of")
            if isinstance(value, FunctionType) and _refers(value, parts):
                yield module, name, value


def _own_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, str, int, Any]]:
    """(module, dictionary, key, value) of the hooks that belong to the model."""
    parts = {id(part) for part in model.modules()}
    for module in model.modules():
        known = {name: vars(module).get(name, {}) for name in _HOOKS}
        functions = [item for name in _HOOKS[:2] for item in known[name].items()]
        own = {key for key, hook in functions if _belongs(hook, module, parts)}
        for name, hooks in known.items():
            yield from ((module, name, key, hook) for key, hook in hooks.items() if key in own)


_KEEP_NOTHING = ("fp8", "torch", "unit_scaling")
"""The packages whose hooks are not part of a model, but for those that mask a weight."""


def package_of(function: Any) -> str:
    """The package that defines a function or a class."""
    module: str = getattr(getattr(function, "func", function), "__module__", None) or ""
    return module.partition(".")[0]


def _belongs(hook: Any, module: nn.Module, parts: set[int]) -> bool:
    """Whether a hook of ``module`` belongs to the model with these parts."""
    if isinstance(hook, BasePruningMethod):
        return True
    package = package_of(hook)
    file = Path(getattr(sys.modules.get(package), "__file__", None) or "")
    installed = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    if installed and package == package_of(bare_class(module)):
        return package not in _KEEP_NOTHING
    if isinstance(hook, MethodType):
        return id(hook.__self__) in parts
    if not isinstance(hook, FunctionType):
        return False
    cells, defaults, named = _kept(hook)
    kept = (*cells, *(defaults or ()), *(named or {}).values())
    return any(id(value) in parts for value in kept)  # not in lists: those may hold call results


def _kept(function: FunctionType) -> list[Any]:
    """The closure contents, defaults and keyword defaults of a function."""
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    return [cells, function.__defaults__, function.__kwdefaults__]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _refers(value: Any, parts: set[int], seen: frozenset[int] = frozenset()) -> bool:
    """Whether a value is or holds a part of the model, as functions do in closures and defaults."""
    if id(value) in parts or id(value) in seen:
        return id(value) in parts
    items: Any = ()
    if isinstance(value, FunctionType):
        items = _kept(value)
    elif isinstance(value, partial):
        items = value.func, value.args, value.keywords
    elif isinstance(value, MethodType):
        items = (value.__self__,)
    elif isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
    seen |= {id(value)}
    return any(_refers(item, parts, seen) for item in items)


def _own(value: Any, parts: set[int], memo: dict[int, Any]) -> Any:
    """A value for the copy: itself unless it refers to a part of the model."""
    return _of_copy(value, parts, memo) if _refers(value, parts) else value


def _of_copy(value: Any, parts: set[int], memo: dict[int, Any]) -> Any:
    """A copy of a value; functions refer to the copies of parts."""
    if (known := memo.get(id(value))) is not None:
        return known
    if isinstance(value, partial):
        named = {name: _own(item, parts, memo) for name, item in value.keywords.items()}
        args = (_own(item, parts, memo) for item in value.args)
        return partial(_own(value.func, parts, memo), *args, **named)
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    cells = value.__closure__ or ()
    own = tuple(CellType() if _refers(_contents(cell), parts) else cell for cell in cells)
    made = FunctionType(value.__code__, value.__globals__, value.__name__, closure=own)
    memo[id(value)] = made  # before its cells, which may hold the function itself
    for cell, mine in zip(cells, own, strict=True):
        if mine is not cell:
            mine.cell_contents = _own(_contents(cell), parts, memo)
    made.__defaults__ = _own(value.__defaults__, parts, memo)
    made.__kwdefaults__ = _own(value.__kwdefaults__, parts, memo)
    made.__dict__.update(vars(value))
    return made
