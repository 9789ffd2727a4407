"""`unit_scale`: a model becomes unit-scaled in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn

from fp8.common.mixin import check_module
from fp8.common.step import unwrapped
from fp8.common.validation import check_flag, check_name
from fp8.surgery.convert import choose_recipes

from .capture.calls import KINDS
from .compile import copied
from .plan.model_plan import ModelPlan, check_fits, retag
from .plan.residuals import RESIDUALS
from .plan.weights import prepare, refuse_weights
from .run.install import find_scope
from .run.pretrained import keep_transform, register
from .run.replay import is_torch_function
from .run.scope import Replacements, UnitScale

__all__ = ["register_transformers", "restore", "unit_scale"]

M = TypeVar("M", bound=nn.Module)

INITS = ("unit", "preserve")
# How the configurations of models name the longest sequence, the most common first.
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "block_size", "max_seq_len", "n_ctx")


def unit_scale(
    module: M,
    replace: Replacements | None = None,
    *,
    init: str = "unit",
    residual: str = "fixed",
    strict: bool = False,
    context_length: int | None = None,
    plan: ModelPlan | None = None,
) -> M:
    """A unit-scaled copy of ``module``.

    What each call needs is worked out at the first call, from the model's data flow, and shown by
    `unit_scaling.report`. The copy is the same model in every other way. It may be edited: the next
    call works out anew what a model of another structure needs.

    replace: torch function -> function to call in its place, with the same arguments, e.g.
    {F.relu: U.relu_squared}. One that has no argument ``inplace`` is called without it: its result
    is a new tensor.
    init: "unit" brings every weight to RMS 1 and every bias to 0; "preserve" changes no parameter
    and no value: casts without scales divide each weight by the nearest power of two of its RMS
    and multiply by it, and a loss inside of the model has its factor.
    residual: the weights of residual branches: "fixed", 0.5 for feed-forward and 0.01 for
    attention branches, or "umup", the rule by depth of `uu.transformer_residual_scaling_rule`;
    the first call then tags the parameters of the branches with the depth of their stack.
    strict: raise ValueError at the first call that is left alone.
    context_length: the number of keys that attention is scaled for, whatever the length at hand,
    so that a prompt and its continuation compute the same. By default that of the model's
    configuration (``max_position_embeddings``, ``n_positions``, ``block_size``), or else the
    number of keys of each attention call when it is first made.

    plan: what `unit_scaling.plan` gave for a model of the same architecture, with its init,
    residual and context_length: the weights are divided by the same numbers, and no first call is
    looked at.

    Raises TypeError for what is not a module or is TorchScript, and for a replacement that is no
    function; ValueError for an unknown option, a replacement for what is not a torch function, and
    a weight that a hook computes (`torch.nn.utils.weight_norm`), and init="preserve" of a model
    with a part that has the factors of init="unit". The first call raises ValueError
    for a function, not a module, under `torch.utils.checkpoint`: it would be computed again without
    its scales; RuntimeError inside `torch.export` or `torch.vmap`, which take a model that has run
    once.
    """
    check_module("unit_scale", module)
    check_name("init", init, INITS)
    check_name("residual", residual, RESIDUALS)
    check_flag("strict", strict)
    _check(replace, context_length)
    refuse_weights(module)
    result = copied(module, "unit_scale")
    inner = unwrapped(result)
    if find_scope(inner, UnitScale) is not None:
        return result
    if plan is not None:
        check_fits(inner, plan)
        given = (("init", init), ("residual", residual), ("context_length", context_length))
        init, residual, context_length = _of_plan(plan, dict(given), replace)
    elif context_length is None:
        context_length = _configured_length(inner)
    scope = UnitScale(
        prepare(inner, init),
        {function: _out_of_place(other) for function, other in dict(replace or {}).items()},
        init=init,
        residual=residual,
        strict=strict,
        context_length=context_length,
    )
    scope.follow(inner)
    if plan is not None:
        retag(inner, plan, rescale=True)
        scope.adopt(plan)
    _finish(inner, scope)
    return result


def restore(model: nn.Module, plan: ModelPlan) -> None:
    """Makes ``model``, whose weights are those of a unit-scaled model already, one in place.

    Raises ValueError where the plan is of another model.
    """
    check_fits(model, plan)
    settings: dict[str, Any] = {"init": plan.init, "residual": plan.residual, "strict": False}
    scope = UnitScale([], {}, **settings, context_length=plan.context_length)
    scope.follow(model)
    retag(model, plan, rescale=False)
    scope.adopt(plan)
    _finish(model, scope)


def _finish(model: nn.Module, scope: UnitScale) -> None:
    """What depends on whether the model is unit-scaled: recipes, and what is saved."""
    choose_recipes(model)
    if scope.unit_scaled:
        keep_transform(model, restore)


def register_transformers() -> None:
    """Has ``from_pretrained`` of the library transformers put the transform of a model back that
    was saved unit-scaled, with its plan: the result computes the same, to the bit.

    `unit_scale` calls it for a model of that library. A program that only loads such models calls
    it once. Raises ImportError without transformers.
    """
    register(restore)


def _of_plan(plan: ModelPlan, given: dict[str, Any], replace: Replacements | None) -> Any:
    """init, residual and context_length of a plan; raises ValueError for others that were given."""
    if replace:
        raise ValueError("plan: it has no place for functions in replace")
    defaults = {"init": "unit", "residual": "fixed", "context_length": None}
    for name, value in given.items():
        planned = getattr(plan, name)
        if value not in (defaults[name], planned):
            raise ValueError(f"plan: it was made with {name}={planned!r}, got {name}={value!r}")
    return plan.init, plan.residual, plan.context_length


def _check(replace: Any, length: Any) -> None:
    if not isinstance(replace, Mapping | None):
        raise TypeError(f"replace: a dict of torch function -> function, got {replace!r}")
    if not all(map(callable, dict(replace or {}).values())):
        raise TypeError(f"replace: what is called in place of a function is one, got {replace!r}")
    for function in replace or {}:
        if not (function in KINDS or is_torch_function(function)):
            raise ValueError(
                f"replace: {function!r} is not a torch function, nothing sees it run; call what is "
                "to take its place in the model itself"
            )
    whole = isinstance(length, int) and not isinstance(length, bool) and length > 0
    if not (length is None or whole):
        raise ValueError(f"context_length is a positive number of keys, got {length!r}")


def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or if it has no argument ``inplace``, one that drops it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # of C, as torch.relu, without a signature
        parameters = []
    takes = any(p.name == "inplace" or p.kind is p.VAR_KEYWORD for p in parameters)
    return function if takes else partial(_without_inplace, function)


def _without_inplace(
    function: Callable[..., Any], *args: Any, inplace: bool = False, **kwargs: Any
) -> Any:
    return function(*args, **kwargs)


def _configured_length(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in CONTEXT_NAMES)
    return next((n for n in found if type(n) is int and n > 0), None)
