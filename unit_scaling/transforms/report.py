"""Reports and plans of transformed models, call by call."""

from __future__ import annotations

from torch import nn

from fp8.common.mixin import check_module
from fp8.common.report import Report
from fp8.common.step import unwrapped

from .plan.actions import CallRow
from .plan.model_plan import ModelPlan
from .run.install import find_scope
from .run.scope import UnitScale
from .simulate import Simulate


def report(model: nn.Module) -> Report[CallRow]:
    """Reports what a transform did to each weight and each call of a model, and why.

    The calls are known after the first call of the model. Each signature of a call (training,
    evaluation, other arguments) adds its own rows.

    Args:
        model: a transformed model.

    Returns:
        Rows with ``path`` (of the module), ``call``, ``done`` and ``why``. ``done`` is "scaled",
        "preserved", "replaced", "measured" (a power of two, for a call without a rule), "unchanged"
        (no factor is needed) or "left alone" (neither a rule nor a measurement applies). ``why``
        includes the power of two that the gradient of a product is multiplied by.

    Raises:
        ValueError: the model has no transform.
    """
    scope, simulation = find_scope(model, UnitScale), find_scope(model, Simulate)
    if scope is None and simulation is None:
        raise ValueError(f"{type(model).__name__} has no transform to report on")
    notes = []
    plans = [] if scope is None else list(scope.plans.values())  # another thread may add one
    if scope is not None and not plans:
        notes.append("The model has not run yet: its calls are not known.")
    for exponent in sorted({plan.outside for plan in plans if plan.outside}):
        notes.append(
            f"The gradient that arrives at the output is multiplied by {2.0**exponent:g}, which "
            "brings it to RMS 1: measured at the first backward pass."
        )
    if simulation is not None:
        recipe = simulation.recipe
        parts = ((what, getattr(recipe, what)) for what in ("input", "weight", "grad"))
        casts = ", ".join(f"{what} {cast.format}" for what, cast in parts if cast is not None)
        notes.append(f"Products are simulated: {casts}.")
    return Report([] if scope is None else scope.report(), notes, heading="call")


def plan(model: nn.Module) -> ModelPlan:
    """Returns the decisions of `unit_scale` for a model, as data to print, save and apply again.

    Args:
        model: a model with `unit_scale` that has run.

    Raises:
        TypeError: ``model`` is not an `nn.Module`.
        ValueError: the model has no `unit_scale`, has not run, or has functions in ``replace``,
            which cannot be saved as data.

    >>> import torch
    >>> from unit_scaling import plan
    >>> from unit_scaling.transforms import ModelPlan, unit_scale
    >>> model = unit_scale(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(-1)))
    >>> _ = model(torch.randn(2, 4))
    >>> print(plan(model))
    plan of unit_scale(init='unit', residual='fixed'), 1 form of call
    module  call       step
    0       relu 0     relu
    1       softmax 0  softmax, end=(0, 0.0)
    >>> ModelPlan.from_json(plan(model).to_json()) == plan(model)
    True
    """
    check_module("plan", model)
    scope = find_scope(model, UnitScale)
    if scope is None:
        raise ValueError(f"plan needs a model with unit_scale, got a {type(model).__name__}")
    result: ModelPlan = scope.plan(unwrapped(model))
    return result
