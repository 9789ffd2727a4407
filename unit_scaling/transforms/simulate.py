"""`simulate_fp8`: every matrix product of a model as low-precision hardware computes it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from fp8.casts.counts import forget_looks
from fp8.common.mixin import check_module
from fp8.common.step import unwrapped
from fp8.common.threads import Stack
from fp8.formats.format import Format, get_format
from fp8.modes.autocast import autocast, outside_compiler
from fp8.recipes.recipe import Cast, Recipe

from ..formats import FPFormat
from .compile import copied
from .run.install import Call, Places, install

__all__ = ["Simulate", "simulate_format", "simulate_fp8"]

M = TypeVar("M", bound=nn.Module)


class Simulate:
    """The scope of simulation: `fp8.autocast` for as long as the model runs."""

    order = 1

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.path = Stack()
        self._active = Stack()  # one item while it is

    def inside(self, path: str) -> Places | None:
        """Nowhere, while the recipe is in force."""
        return () if self._active.items else None

    def run(
        self, call: Call, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """``call()`` under the recipe."""
        return call() if self._active.items else self._simulated(call)

    def _simulated(self, call: Call, eager: bool = False) -> Any:
        traced = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        if not (eager or traced):
            return outside_compiler(lambda: self._simulated(call, eager=True))
        # Not a with statement, for the reason given in UnitScale._replay.
        mode = autocast(self.recipe, opaque="warn")
        mode.reenters = True  # every module does, when it is called
        self._active.items.append(True)
        mode.__enter__()
        try:
            return call()
        finally:
            mode.__exit__(None, None, None)
            self._active.items.pop()


def simulate_format(
    module: M, fwd_format: FPFormat | Format | str, bwd_format: FPFormat | Format | str
) -> M:
    """A copy of ``module`` whose products have operands in one format and gradients in another.

    Each is an `FPFormat`, honoured in full (exponent and mantissa bits, rounding, random bits), or
    an `fp8.Format` or the name of one of `fp8.FORMATS`, rounded to nearest.
    Raises TypeError for what is not a module or not a format, ValueError for an unknown name.

    >>> model = simulate_format(nn.Linear(4, 8), "e4m3", "e5m2")
    """
    forward, backward = _cast("fwd_format", fwd_format), _cast("bwd_format", bwd_format)
    name = f"simulate({fwd_format}, {bwd_format})"
    recipe = Recipe(name=name, input=forward, weight=forward, grad=backward)
    return _simulate(module, recipe, "simulate_format")


def _cast(what: str, format: object) -> Cast:
    if isinstance(format, Format | str):
        return Cast(format=get_format(format))
    if not isinstance(format, FPFormat):
        raise TypeError(
            f"simulate_format: {what} is an FPFormat, an fp8.Format or the name of one, got "
            f"{type(format).__name__}"
        )
    return Cast(format=format.format, rounding=format.rounding, random_bits=format.random_bits)


def simulate_fp8(module: M) -> M:
    """A copy of ``module`` whose products run in FP8: e4m3 forward, e5m2 for gradients.

    The formats of the OCP 8-bit floating point specification, with scale 1, saturating, rounded to
    nearest even: what an H100 computes from tensors cast without a scale.
    """
    forward = Cast(format="e4m3")
    recipe = Recipe(name="simulate_fp8", input=forward, weight=forward, grad=Cast(format="e5m2"))
    return _simulate(module, recipe, "simulate_fp8")


def _simulate(model: M, recipe: Recipe, transform: str) -> M:
    check_module("simulation", model)
    result = copied(model, transform)
    install(unwrapped(result), Simulate(recipe))
    forget_looks(unwrapped(result))
    return result
