"""Copies of a model that `copy.deepcopy` alone would refuse, or get wrong.

It refuses a tensor that a module keeps of its last call (an attention map, ``self.last_loss``): a
graph of autograd cannot be copied, so the copy has its values alone. And it takes functions as they
are: ``self.f = lambda x: mlp.act(x)`` of the copy would run the parts of the original.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from .record import tensors_in

__all__ = ["deep_copy", "detached", "twin_of"]

M = TypeVar("M", bound=nn.Module)

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def deep_copy(module: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy of ``module``. memo: what to take for an object of that id instead of a copy.

    Raises TypeError for a TorchScript function among the attributes, whose parts are hidden.
    """
    memo = {} if memo is None else memo
    parts = {id(part) for part in (*module.modules(), *module.parameters())}
    functions = list(_functions(module, parts))
    for part in module.modules():
        kept = [t for _, t in tensors_in(vars(part)) if t.grad_fn is not None]
        memo.update({id(t): t.detach().clone() for t in kept if id(t) not in memo})
    result = copy.deepcopy(module, memo)
    for owner, name, function in functions:
        vars(memo[id(owner)])[name] = _rebound(function, parts, memo)
    return result


def twin_of(module: M, scope: object, its_scope: object) -> M:
    """A copy that shares parameters, with ``its_scope`` in place of ``scope``, with buffers of its
    own and without hooks."""
    shared: dict[int, Any] = {id(p): p for p in module.parameters()}
    shared[id(scope)] = its_scope
    for child in module.modules():
        shared.update({id(getattr(child, name)): type(getattr(child, name))() for name in _HOOKS})
    return deep_copy(module, shared)


def detached(value: Any) -> Any:
    """A copy of arguments that shares no storage with them."""
    memo: dict[int, Any] = {id(t): t.detach().clone() for _, t in tensors_in(value)}
    return copy.deepcopy(value, memo)


def _functions(model: nn.Module, parts: set[int]) -> Iterator[tuple[nn.Module, str, FunctionType]]:
    """The functions among the attributes that hold a part of the model: (owner, name, function)."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.jit.ScriptFunction):
                place = f"{path}.{name}" if path else name
                raise TypeError(f"{place!r} is a TorchScript function: use the one it was made of")
            if isinstance(value, FunctionType) and _holds(_kept(value), parts):
                yield module, name, value


def _kept(function: FunctionType) -> list[Any]:
    """What a function keeps of where it was made."""
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    return [*cells, function.__defaults__, function.__kwdefaults__]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _holds(value: Any, parts: set[int]) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_holds(item, parts) for item in value)
    return id(value) in parts


def _rebound(function: FunctionType, parts: set[int], memo: dict[int, Any]) -> FunctionType:
    """The function with the copies of the parts that it holds."""

    def of_copy(value: Any) -> Any:
        return copy.deepcopy(value, memo) if _holds(value, parts) else value

    cells = tuple(
        CellType(of_copy(_contents(cell))) if _holds(_contents(cell), parts) else cell
        for cell in function.__closure__ or ()
    )
    made = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        of_copy(function.__defaults__),
        cells,
    )
    made.__kwdefaults__ = of_copy(function.__kwdefaults__)
    made.__dict__.update(vars(function))
    return made
