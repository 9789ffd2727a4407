"""`compile`: a compiled copy of a model, whatever transforms it has or gets."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

from .install import Call, find_scope, install, unwrapped

__all__ = ["Compile", "compile", "copied"]

M = TypeVar("M", bound=nn.Module)


class Compile:
    """Marks a model as compiled, so that copies of it (those of transforms too) are as well."""

    order = 2

    def __init__(self) -> None:
        self.path: list[str] = []

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
    if not isinstance(module, nn.Module):
        raise TypeError(f"compile needs an nn.Module, got {type(module).__name__}")
    result = copied(module)
    if find_scope(result, Compile) is None:
        install(result, Compile())
        result.compile()
    return result


def copied(module: M) -> M:
    """A deep copy of a model; a compiled one stays compiled.

    `copy.deepcopy` alone drops what `nn.Module.compile` did.
    """
    result = copy.deepcopy(module)
    if find_scope(result, Compile) is not None and unwrapped(result) is result:
        result.compile()
    return result
