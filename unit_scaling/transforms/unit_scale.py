"""`unit_scale`: converts a model to a unit-scaled one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fp8.common.mixin import check_module
from fp8.common.step import unwrapped
from fp8.common.validation import check_name
from fp8.surgery.convert import choose_recipes

from ..checks.trained import warn_if_trained
from .compile import M, copied
from .install import find_scope, install, is_in_fsdp, is_sharded
from .plan.plan import ModelPlan, check_fits
from .plan.planner import RESIDUALS
from .plan.weights import prepare, refuse_weights
from .record.kinds import KINDS, is_torch_function
from .run.transform import Replacements, UnitScale


def unit_scale(
    module: M,
    replace: Replacements | None = None,
    *,
    init: str = "unit",
    residual: str = "completep",
    plan: ModelPlan | None = None,
) -> M:
    """Returns a unit-scaled copy of ``module``.

    The first call finds the factors of products and residual adds from the model's data flow;
    `unit_scaling.report` shows them. All gradients are those of the resulting function. The copy
    may be edited, and is otherwise the same model.

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

    Returns:
        The copy. Its first call raises ValueError for a function (not a module) under
        `torch.utils.checkpoint`, which would be recomputed without its scales, and for a later
        parametrization with parameters of its own, and RuntimeError inside `torch.export` or
        `torch.vmap`, which need a model that has run once.

    Raises:
        TypeError: ``module`` is not an `nn.Module` or is TorchScript, or a replacement is not
            callable.
        ValueError: an option is unknown, a replacement is for something other than a torch
            function, a hook computes a weight (`torch.nn.utils.weight_norm`), processes have
            divided the weights, or ``init="preserve"`` is used on a model of which a submodule was
            scaled with ``init="unit"``.
    """
    check_module("unit_scale", module)
    check_name("init", init, ("unit", "preserve"))
    check_name("residual", residual, RESIDUALS)
    _check(replace)
    refuse_weights(module)
    if is_sharded(module) and not is_in_fsdp(module):
        raise ValueError(
            "unit_scale reads whole weights, which parallelize_module has divided: call it, and "
            "its model once, before that"
        )
    result = copied(module, "unit_scale")
    inner = unwrapped(result)
    if find_scope(inner, UnitScale) is not None:
        return result
    if init == "unit" and plan is None:
        warn_if_trained(unwrapped(module), "unit_scale")
    if plan is not None:
        check_fits(inner, plan)
        init, residual = _of_plan(plan, {"init": init, "residual": residual}, replace)
    others = {function: _out_of_place(other) for function, other in dict(replace or {}).items()}
    scope = UnitScale(ModelPlan(init, residual), others)
    scope.plan.rows += prepare(inner, init)
    scope.check_parts(inner)
    install(inner, scope)
    if plan is not None:
        scope.adopt(inner, plan, rescale=True)
    choose_recipes(inner)
    return result


def _of_plan(plan: ModelPlan, given: dict[str, Any], replace: Replacements | None) -> Any:
    """Init and residual of a plan; raises ValueError if others were given."""
    if replace:
        raise ValueError("plan: cannot be combined with functions in replace")
    defaults = {"init": "unit", "residual": RESIDUALS[0]}
    for name, value in given.items():
        planned = getattr(plan, name)
        if value not in (defaults[name], planned):
            raise ValueError(f"plan: it was made with {name}={planned!r}, got {name}={value!r}")
    return plan.init, plan.residual


def _check(replace: Any) -> None:
    if not isinstance(replace, Mapping | None):
        raise TypeError(f"replace: a dict of torch function -> function, got {replace!r}")
    if not all(map(callable, dict(replace or {}).values())):
        raise TypeError(f"replace: a replacement must be callable, got {replace!r}")
    for function in replace or {}:
        if not (function in KINDS or is_torch_function(function)):
            raise ValueError(
                f"replace: {function!r} is not a torch function, so its calls are not intercepted; "
                "call the replacement in the model itself"
            )


def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, wrapped to drop ``inplace`` if it has no such argument."""
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
