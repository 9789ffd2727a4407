"""`unit_scale`: converts a model to a unit-scaled one; its report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8.common.mixin import check_module
from fp8.common.report import Report
from fp8.common.step import Batch, unwrapped
from fp8.surgery.convert import choose_recipes

from ..checks.trained import warn_if_trained
from ..parameter import tags_of
from .compile import M, copied
from .install import find_scope, install, is_in_fsdp, is_sharded
from .plan.plan import CallRow, ModelPlan
from .plan.weights import prepare, refuse_weights
from .record.kinds import KINDS
from .run.transform import Replacements, UnitScale
from .values.set_values import REPORTS, set_values


def unit_scale(
    module: M,
    replace: Replacements | None = None,
    *,
    batch: Batch | None = None,
) -> M:
    """Returns a unit-scaled copy of ``module``.

    With ``batch`` it multiplies parameters by numbers and leaves: the copy is a plain model, of the
    same classes, graph and state_dict, and `unit_scaling.optim` has its learning rates. Without it
    the factors stay in the model: its first call finds those of products and residual adds from
    the data flow. `unit_scaling.report` shows what was done. All gradients are those of the
    resulting function. The copy may be edited, and is otherwise the same model.

    Warns (`fp8.warnings.ConvertWarning`) for a trained model, whose function is not kept: use
    ``fp8.convert(model, "static")`` for that.

    Args:
        module: the model; it is not changed.
        replace: maps torch functions to functions with the same arguments to call instead, e.g.
            {F.relu: U.relu_squared}. A function without an ``inplace`` argument is called without
            it; its result is copied to where the original would write.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments
            of the model, which is run on copies of it, in its mode. Cannot be combined with
            ``replace``.

    Returns:
        The copy. Its first call raises ValueError for a function (not a module) under
        `torch.utils.checkpoint`, which would be recomputed without its scales, and for a later
        parametrization with parameters of its own, and RuntimeError inside `torch.export`,
        `torch.vmap` or `torch.func.functional_call`, which need a model that has run once.

    Raises:
        TypeError: ``module`` is not an `nn.Module` or is TorchScript, or a replacement is not
            callable.
        ValueError: a replacement is for something other than a torch function, a hook computes a
            weight (`torch.nn.utils.weight_norm`), processes have divided the weights, the model is
            unit-scaled already in another way, or a number of ``batch`` is not finite.
    """
    check_module("unit_scale", module)
    _check(replace)
    refuse_weights(module)
    if is_sharded(module) and not is_in_fsdp(module):
        raise ValueError(
            "unit_scale reads whole weights, which parallelize_module has divided: call it, and "
            "its model once, before that"
        )
    result = copied(module, "unit_scale")
    inner = unwrapped(result)
    if batch is not None:
        _check_alone(replace, inner)
        warn_if_trained(unwrapped(module))
        set_values(inner, unwrapped(module), batch)
        return result
    others = {function: _out_of_place(other) for function, other in dict(replace or {}).items()}
    if (known := find_scope(inner, UnitScale)) is not None:
        _check_same(known, others)
        return result
    warn_if_trained(unwrapped(module))
    scope = UnitScale(ModelPlan(), others)
    scope.plan.rows += prepare(inner)
    install(inner, scope)
    choose_recipes(inner)
    return result


def _check_alone(replace: Any, model: nn.Module) -> None:
    """Raises ValueError for options and models that `set_values` does not have."""
    if replace:
        raise ValueError("batch: cannot be combined with replace")
    if find_scope(model, UnitScale) is not None or any(
        tags_of(p).mup_divisor for p in model.parameters()
    ):
        raise ValueError("batch: the model is unit-scaled already: transform the plain model")


def _check_same(scope: UnitScale, replace: Replacements) -> None:
    """Raises ValueError for other functions than those of a model that is unit-scaled already."""
    if not replace.keys() <= scope.replacements.keys():
        raise ValueError(
            "the model is unit-scaled already, without these functions in replace: transform the "
            "plain model"
        )


def _check(replace: Any) -> None:
    if not isinstance(replace, Mapping | None):
        raise TypeError(f"replace: a dict of torch function -> function, got {replace!r}")
    if not all(map(callable, dict(replace or {}).values())):
        raise TypeError(f"replace: a replacement must be callable, got {replace!r}")
    listed = torch.overrides.get_overridable_functions().values()
    for function in replace or {}:
        if function not in KINDS and not any(function in functions for functions in listed):
            raise ValueError(
                f"replace: {function!r} is not a torch function, so its calls are not intercepted; "
                "call the replacement in the model itself"
            )


def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, without ``inplace`` if it has no such argument."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # C functions such as torch.relu have no signature
        parameters = []
    takes = any(p.name == "inplace" or p.kind is p.VAR_KEYWORD for p in parameters)
    return function if takes else partial(_without_inplace, function)


def _without_inplace(
    function: Callable[..., Any], *args: Any, inplace: bool = False, **kwargs: Any
) -> Any:
    return function(*args, **kwargs)


# What is asked of a transformed model


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
    check_module("report", model)
    if (values := REPORTS.get(unwrapped(model))) is not None:
        return values
    scope: UnitScale | None = find_scope(model, UnitScale)
    if scope is None:
        raise ValueError(f"report needs a model with unit_scale, got a {type(model).__name__}")
    plan = scope.plan
    notes = [] if plan.entries else ["The model has not run yet: its calls are not known."]
    return Report(plan.rows, notes, heading="call")
