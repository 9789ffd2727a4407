"""What is asked of a transformed model: its report, its plan, new gauges, the plain model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8.common.mixin import check_module, lose
from fp8.common.report import Report
from fp8.common.step import Batch, Loss, arguments, unwrapped

from .compile import M, copied
from .plan.actions import CallRow
from .plan.model_plan import ModelPlan
from .run.install import find_scope, uninstall
from .run.pretrained import Pretrained
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
    return _scope("plan", model).plan(unwrapped(model))


def recalibrate(model: nn.Module, batch: Batch, loss: Loss | None = None) -> None:
    """Measures the gradient scale factors again, in one forward and backward pass of a copy.

    The function and the gradients of parameters do not depend on these factors, so an optimizer
    continues unaffected. Parameters, their ``.grad``, buffers and the random state are not changed.
    Compiled code is recompiled at its next call.

    Args:
        model: a model with `unit_scale`, changed in place.
        batch: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
        loss: maps the model's output to a scalar; for models that do not compute their loss.

    Raises:
        TypeError: ``model`` is not an `nn.Module`.
        ValueError: ``model`` has no `unit_scale`.

    >>> import torch
    >>> from unit_scaling.transforms import recalibrate, unit_scale
    >>> model = unit_scale(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)))
    >>> x = torch.randn(4, 8)
    >>> model(x).square().mean().backward()
    >>> recalibrate(model, x, loss=lambda y: y.square().mean())
    """
    _scope("recalibrate", model).recalibrate(unwrapped(model), arguments(batch), loss)


@torch.no_grad()
def fold(module: M) -> M:
    """Returns a plain model with the factors of `unit_scale` multiplied into its weights.

    The copy has the class and state_dict of the plain model and computes the same output as
    ``module`` in evaluation mode. Hooks, dtypes, devices, requires_grad and other transforms are
    kept. Training differs: dropout has other factors, and the effective learning rates change.

    The result is exact up to two roundings. The factors are not powers of two, so each weight is
    rounded once in its dtype. Norms add eps to squares of another scale: the relative difference is
    eps / 2 times the deviation of the squared ratio from 1. With ``init="preserve"`` there are no
    factors and the result is exact.

    Args:
        module: a model with `unit_scale` that has run. If it is wrapped by `torch.compile`, the
            wrapped model is folded.

    Returns:
        A model of the same class, without the transform.

    Raises:
        TypeError: ``module`` is not an `nn.Module`.
        ValueError: the model has no `unit_scale`, has not run, or has a factor that no weight can
            absorb: functions in ``replace``, and weights shared by layers with different factors.
            The message names the calls.

    >>> import torch
    >>> from unit_scaling.transforms import fold, unit_scale
    >>> x, model = torch.randn(4, 8), unit_scale(torch.nn.Linear(8, 8))
    >>> y = model(x)
    >>> torch.testing.assert_close(fold(model)(x), y)
    """
    scope = _scope("fold", module)
    inner: Any = unwrapped(module)
    factors = scope.outside(inner).factors
    result: M = copied(inner, "fold")
    tensors = dict((*result.named_parameters(), *result.named_buffers()))
    for name, factor in factors.items():
        tensors[name].mul_(factor)
    uninstall(result, UnitScale)
    for part in result.modules():
        lose(part, Pretrained)
    return result


def _scope(what: str, model: nn.Module) -> UnitScale:
    """The scope of a model's unit_scale. what: the name of the calling function."""
    check_module(what, model)
    scope: UnitScale | None = find_scope(model, UnitScale)
    if scope is None:
        raise ValueError(f"{what} needs a model with unit_scale, got a {type(model).__name__}")
    return scope
