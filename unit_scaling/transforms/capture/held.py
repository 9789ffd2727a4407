"""Tensors that the modules of a model hold among their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8.common.mixin import gained_attributes
from fp8.common.step import unfolded

from .record import tensors_in

HELD = " held"
"""Suffix of a module's name in the first part of the `Slot` of a tensor among its attributes."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has: its parameters, buffers, submodules, hooks."""


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module beside those of every module and those of transforms."""
    others = _OF_MODULES.union(gained_attributes(module))
    return ((name, value) for name, value in vars(module).items() if name not in others)


def held_by(model: nn.Module, path: str) -> dict[str, dict[str, Any]]:
    """The attributes of the modules of ``model``, which is at ``path``, that hold tensors with a
    gradient function: by the module's name with the suffix `HELD`.
    """
    found: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()  # modules share configurations
    for name, module in model.named_modules(prefix=path):
        for attribute, value in own_attributes(module):
            value = unfolded(value, seen)
            if any(t.grad_fn is not None for _, t in tensors_in(value)):
                found.setdefault(name + HELD, {})[attribute] = value
    return found
