"""`simulate_fp8`: runs every matrix product of a model in simulated low precision."""

from __future__ import annotations

import warnings
from dataclasses import replace

from torch import nn

from fp8.casts.counts import forget_checks
from fp8.common.step import unwrapped
from fp8.common.validation import check_module
from fp8.formats.format import Format, get_format
from fp8.layers.convert import convert
from fp8.modes.autocast import autocast
from fp8.recipes.cast import Cast
from fp8.recipes.recipe import OPERANDS, Recipe
from fp8.warnings import ConvertWarning

from ..formats import FPFormat
from .compile import M, copied
from .install import Scope, find_scope, install
from .values.pending import is_unit_scaled


class Simulate(Scope):
    """Runs the model under `fp8.autocast`. casts: those that the caller asked for; recipe: with the
    scaling that the model needs."""

    order = 1

    def __init__(self, casts: Recipe, recipe: Recipe) -> None:
        super().__init__()
        self.casts = casts
        self.recipe = recipe
        formats = [cast.format for cast in (casts.input, casts.grad) if cast]
        names = [get_format(format).name for format in formats]
        self.title = f"simulated casts to {' and '.join(names)}"

    def mode(self) -> autocast:
        mode = autocast(self.recipe)
        mode.reenters = True  # every module is reentered when it is called
        return mode


def simulate_format(
    module: M, fwd_format: FPFormat | Format | str, bwd_format: FPFormat | Format | str
) -> M:
    """Returns a copy of ``module`` whose products cast operands and gradients to given formats.

    Args:
        module: the model; it is not changed.
        fwd_format: the format of the operands. An `FPFormat` sets exponent and mantissa bits and
            rounding; an `fp8.Format`, or the name of one in `fp8.FORMATS`, rounds to nearest.
        bwd_format: the format of the gradients, likewise.

    Raises:
        TypeError: ``module`` is not an `nn.Module`, or a format has another type.
        ValueError: the name of a format is unknown, or an `FPFormat` has fewer random bits than it
            drops.

    >>> model = simulate_format(nn.Linear(4, 8), "e4m3", "e5m2")
    """
    forward = _cast("fwd_format", fwd_format)
    backward = _cast("bwd_format", bwd_format)
    name = f"simulate({fwd_format}, {bwd_format})"
    return _simulate(module, "simulate_format", name, forward, backward)


def _cast(what: str, format: object) -> Cast:
    if isinstance(format, Format | str):
        return Cast(format=get_format(format))
    if not isinstance(format, FPFormat):
        raise TypeError(
            f"simulate_format: {what} is an FPFormat, an fp8.Format or the name of one, got "
            f"{type(format).__name__}"
        )
    if format.random_bits != 31:
        raise ValueError(
            f"simulate_format: {what} has srbits={format.srbits}; casts of products draw all "
            "random bits: use srbits=0"
        )
    return Cast(format=format.format, rounding=format.rounding)


def simulate_fp8(module: M) -> M:
    """Returns a copy of ``module`` whose products run in FP8: E4M3 operands and E5M2 gradients.

    The casts saturate and round to nearest even, at scale 1, as an H100 computes on tensors cast
    without scales. In a model of `unit_scale`, whose weights and gradients have sizes of their own,
    layers have the static scales of `fp8.convert`, and products without a layer those of recipe
    "tensor".

    Source: OCP 8-bit Floating Point Specification.
    """
    name = "simulate_fp8"
    return _simulate(module, name, name, Cast(format="e4m3"), Cast(format="e5m2"))


def _simulate(model: M, transform: str, name: str, forward: Cast, backward: Cast) -> M:
    check_module("simulation", model)
    casts = Recipe(name=name, input=forward, weight=forward, grad=backward)
    result = copied(model, transform)
    _install(unwrapped(result), casts)
    return result


def _install(model: nn.Module, casts: Recipe) -> None:
    recipe = casts
    if is_unit_scaled(model):
        with warnings.catch_warnings():
            # A model without layers is simulated too.
            warnings.simplefilter("ignore", ConvertWarning)
            convert(model, _scaled(casts, "static"), backend="simulate")
        recipe = _scaled(casts, "tensor")
    install(model, Simulate(casts, recipe))
    forget_checks(model)


def _scaled(casts: Recipe, scaling: str) -> Recipe:
    """The casts with scales."""
    operands = {
        role: replace(getattr(casts, role), scaling=scaling) for role in OPERANDS
    }
    return replace(casts, **operands)


def resimulate(model: nn.Module) -> None:
    """Gives a model that was simulated before `unit_scale` the scales of one that is after it."""
    scope: Simulate | None = find_scope(model, Simulate)
    if scope is not None:
        _install(model, scope.casts)
