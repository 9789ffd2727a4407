"""`unit_scale`: converts a model to a unit-scaled one; its report, its plan, the plain model."""

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
from fp8.common.validation import check_name
from fp8.surgery.convert import choose_recipes

from ..checks.trained import warn_if_trained
from ..parameter import tags_of
from .compile import M, copied
from .install import find_scope, install, is_in_fsdp, is_sharded, uninstall
from .plan.plan import CallRow, ModelPlan
from .plan.planner import RESIDUALS
from .plan.weights import prepare, refuse_weights
from .record.kinds import KINDS
from .run.transform import Replacements, UnitScale
from .values.set_values import REPORTS, set_values


def unit_scale(
    module: M,
    replace: Replacements | None = None,
    *,
    init: str = "unit",
    residual: str = "completep",
    plan: ModelPlan | None = None,
    batch: Batch | None = None,
) -> M:
    """Returns a unit-scaled copy of ``module``.

    With ``batch`` it multiplies parameters by numbers and leaves: the copy is a plain model, of the
    same classes, graph and state_dict, and `unit_scaling.optim` has its learning rates. Without it
    the factors stay in the model: its first call finds those of products and residual adds from
    the data flow. `unit_scaling.report` shows what was done. All gradients are those of the
    resulting function. The copy may be edited, and is otherwise the same model.

    Warns (`fp8.warnings.ConvertWarning`) for a trained model, which init="unit" would ruin.

    Args:
        module: the model; it is not changed.
        replace: maps torch functions to functions with the same arguments to call instead, e.g.
            {F.relu: U.relu_squared}. A function without an ``inplace`` argument is called without
            it; its result is copied to where the original would write.
        init: "unit" scales every weight to RMS 1 and sets every bias to 0. "preserve" changes no
            parameter and no value: casts without scales divide each weight by the power of two
            nearest to its RMS and multiply the product by it.
        residual: the weights of residual branches. "completep": in proportion to one over their
            number, so that learning rates do not depend on it. "fixed": 0.5 for feed-forward and
            0.01 for attention branches, as in unit-scaling 0.3.5.
        plan: the result of `unit_scaling.plan` for a model of the same architecture, init and
            residual. The weights are divided by the same numbers and the model is not recorded.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments
            of the model, which is run on copies of it, in its mode. Cannot be combined with other
            options.

    Returns:
        The copy. Its first call raises ValueError for a function (not a module) under
        `torch.utils.checkpoint`, which would be recomputed without its scales, and for a later
        parametrization with parameters of its own, and RuntimeError inside `torch.export`,
        `torch.vmap` or `torch.func.functional_call`, which need a model that has run once.

    Raises:
        TypeError: ``module`` is not an `nn.Module` or is TorchScript, a replacement is not
            callable, or ``plan`` is no plan.
        ValueError: an option is unknown, a replacement is for something other than a torch
            function, a hook computes a weight (`torch.nn.utils.weight_norm`), processes have
            divided the weights, ``init="preserve"`` is used on a model of which a submodule was
            scaled with ``init="unit"``, the model is unit-scaled already in another way, or a
            number of ``batch`` is not finite.
    """
    check_module("unit_scale", module)
    _check(replace, init, residual, plan)
    refuse_weights(module)
    if is_sharded(module) and not is_in_fsdp(module):
        raise ValueError(
            "unit_scale reads whole weights, which parallelize_module has divided: call it, and "
            "its model once, before that"
        )
    result = copied(module, "unit_scale")
    inner = unwrapped(result)
    if batch is not None:
        _check_alone(replace, init, residual, plan, inner)
        warn_if_trained(unwrapped(module))
        set_values(inner, unwrapped(module), batch)
        return result
    others = {function: _out_of_place(other) for function, other in dict(replace or {}).items()}
    if (known := find_scope(inner, UnitScale)) is not None:
        _check_same(known, init, residual, others, plan)
        return result
    if init == "unit" and plan is None:
        warn_if_trained(unwrapped(module))
    if plan is not None:
        init, residual = _of_plan(plan, init, residual)
    scope = UnitScale(ModelPlan(init, residual), others)
    scope.plan.rows += prepare(inner, init)
    scope.check_parts(inner)
    install(inner, scope)
    if plan is not None:
        scope.adopt(inner, plan, rescale=True)
    choose_recipes(inner)
    return result


def _of_plan(plan: ModelPlan, init: str, residual: str) -> tuple[str, str]:
    """The init and residual of a plan. Raises ValueError for others in the call."""
    for name, value, default in (("init", init, "unit"), ("residual", residual, RESIDUALS[0])):
        planned = getattr(plan, name)
        if value not in (default, planned):
            raise ValueError(f"plan: it was made with {name}={planned!r}, got {name}={value!r}")
    return plan.init, plan.residual


def _check_alone(replace: Any, init: str, residual: str, plan: Any, model: nn.Module) -> None:
    """Raises ValueError for options and models that `set_values` does not have."""
    if replace or plan is not None or (init, residual) != ("unit", RESIDUALS[0]):
        raise ValueError("batch: cannot be combined with replace, init, residual or plan")
    if find_scope(model, UnitScale) is not None or any(
        tags_of(p).mup_divisor for p in model.parameters()
    ):
        raise ValueError("batch: the model is unit-scaled already: transform the plain model")


def _check_same(
    scope: UnitScale, init: str, residual: str, replace: Replacements, plan: ModelPlan | None
) -> None:
    """Raises ValueError for other options than those of a model that is unit-scaled already."""
    now = scope.plan
    same = (init, residual) == (now.init, now.residual) and plan is None
    if not (same and replace.keys() <= scope.replacements.keys()):
        raise ValueError(
            f"the model is unit-scaled already, with init={now.init!r}, residual={now.residual!r}: "
            "pass these, or transform the plain model (unit_scaling.fold)"
        )


def _check(replace: Any, init: str, residual: str, plan: Any) -> None:
    check_name("init", init, ("unit", "preserve"))
    check_name("residual", residual, RESIDUALS)
    if not isinstance(plan, ModelPlan | None):
        raise TypeError(f"plan: what unit_scaling.plan returns, got a {type(plan).__name__}")
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
    if replace and plan is not None:
        raise ValueError("plan: cannot be combined with functions in replace")


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
    >>> from unit_scaling.transforms import unit_scale
    >>> model = unit_scale(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    >>> _ = model(torch.randn(2, 4))
    >>> print(plan(model))
    plan of unit_scale(init='unit', residual='completep')
    module  call    step
    0       linear  linear, factor=0.5, names=('weight', 'bias', 'output', 'input')
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

    Each weight is rounded once in its dtype, as the factors are not powers of two. Norms add eps to
    squares of another scale: the relative difference is eps / 2 times the deviation of the squared
    ratio from 1. With ``init="preserve"`` there are no factors and the result is exact.

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
