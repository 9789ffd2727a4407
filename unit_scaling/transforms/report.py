"""What a transform did to a model, call by call."""

from __future__ import annotations

from torch import nn

from fp8.report import Report

from .install import find_scope
from .simulate import Simulate
from .steps import Row
from .unit_scale import UnitScale

__all__ = ["Report", "report"]


def report(model: nn.Module) -> Report[Row]:
    """One row for each weight and each call of a transformed model: what was done, and if not why.

    A row has ``path`` (of the module), ``call``, ``done`` ("scaled", "preserved", "replaced",
    "unchanged" where no factor is due, "left alone" where there is no rule) and ``why``. The calls
    are known after the first call of the model; each form of call (training, evaluation, other
    arguments) adds those it makes.
    Raises ValueError for a model without a transform.
    """
    scope, simulation = find_scope(model, UnitScale), find_scope(model, Simulate)
    if scope is None and simulation is None:
        raise ValueError(f"{type(model).__name__} has no transform to report on")
    notes = []
    if scope is not None and not scope.plans:
        notes.append("The model has not run yet: its calls are not known.")
    if simulation is not None:
        recipe = simulation.recipe
        parts = ((what, getattr(recipe, what)) for what in ("input", "weight", "grad"))
        casts = ", ".join(f"{what} {cast.format}" for what, cast in parts if cast is not None)
        notes.append(f"Products are simulated: {casts}.")
    return Report([] if scope is None else scope.report(), notes, heading="call")
