"""What is asked of a transformed model: its report, its plan, the plain model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8.common.mixin import check_module
from fp8.common.report import Report
from fp8.common.step import unwrapped

from .compile import M, copied
from .install import find_scope, uninstall
from .plan.plan import CallRow, ModelPlan
from .run.transform import UnitScale


def report(model: nn.Module) -> Report[CallRow]:
    """Reports what `unit_scale` did to each weight and each call of a model, and why.

    The calls are known after the first call of the model; a later one that takes another branch
    adds rows.

    Args:
        model: a model with `unit_scale`.

    Returns:
        Rows with ``path`` (of the module), ``call``, ``done`` and ``why``. ``done`` is "scaled",
        "replaced", "unchanged" or "left alone" (what an autograd function computes). ``why``
        includes the powers of two that arguments of a product are cast at.

    Raises:
        TypeError: ``model`` is not an `nn.Module`.
        ValueError: the model has no `unit_scale`.
    """
    plan = _scope("report", model).plan
    notes = [] if plan.entries else ["The model has not run yet: its calls are not known."]
    return Report(plan.rows, notes, heading="call")


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
    >>> model = unit_scale(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    >>> _ = model(torch.randn(2, 4))
    >>> print(plan(model))
    plan of unit_scale(init='unit', residual='completep')
    module  call    step
    0       linear  linear, factor=0.5, names=('weight', 'bias', 'output', 'input')
    >>> ModelPlan.from_json(plan(model).to_json()) == plan(model)
    True
    """
    scope = _scope("plan", model)
    scope.check_seen(model)
    return scope.data(unwrapped(model))


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
    factors = scope.factors(inner).factors
    result: M = copied(inner, "fold")
    tensors = dict((*result.named_parameters(), *result.named_buffers()))
    for name, factor in factors.items():
        tensors[name].mul_(factor)
    uninstall(result, UnitScale)
    return result


def _scope(what: str, model: nn.Module) -> UnitScale:
    """The scope of a model's unit_scale. what: the name of the calling function."""
    check_module(what, model)
    scope: UnitScale | None = find_scope(model, UnitScale)
    if scope is None:
        raise ValueError(f"{what} needs a model with unit_scale, got a {type(model).__name__}")
    return scope
