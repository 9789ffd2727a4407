"""Accelerate: prepares models and optimizers for its `Accelerator`, in FP8 and at a level.

Replaces ``Accelerator(mixed_precision="fp8")``; accepts Accelerate's recipe objects, whose options
take effect or raise an error, and our recipes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..common.libraries import need
from ..common.validation import check_name
from ..layers.adapters import adapter
from ..layers.convert import convert, expand, revert_layers
from ..layers.select import ADAPTERS, Where, checked_where
from ..products.active import BACKENDS
from ..recipes.policy import Policy
from ..recipes.recipe import AUTO, Recipe
from ..training.levels import initialize
from .transformer_engine import TERecipe, delayed_scaling, format_of, te_recipe

__all__ = ["prepare"]

# Objects of Accelerate, which may not be installed.
Accelerator = Any
Kwargs = Any

# Options of TERecipeKwargs that MXFP8 block scaling does not have -> their defaults.
_NOT_OF_MXFP8: dict[str, Any] = {
    "margin": 0,
    "interval": 1,
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, False),
}

# Accelerate's recipe object -> its backend.
_KINDS = {
    "TERecipeKwargs": "transformer_engine",
    "AORecipeKwargs": "torchao",
    "MSAMPRecipeKwargs": "msamp",
}

_OURS = str | Recipe | Policy


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    recipe: str | Recipe | Policy | Kwargs = AUTO,
    backend: str = "auto",
    opt_level: str | None = None,
    where: Where | None = None,
) -> Any:
    """Converts the models among ``objects``, then returns ``accelerator.prepare(*objects)``.

    A model that is to stay as it is goes to ``accelerator.prepare`` directly; models with different
    recipes take a call each.

    Args:
        accelerator: an Accelerator with mixed_precision "no" or "bf16".
        objects: models, optimizers, data loaders and schedulers, in any order.
        recipe: ours, as in `fp8.convert` (call `fp8.advance` for the switch of a policy); or one of
            Accelerate's, each for its own backend: TERecipeKwargs ("transformer_engine"),
            AORecipeKwargs ("torchao"), MSAMPRecipeKwargs ("msamp").
        backend: as in `fp8.convert`, or "msamp": MS-AMP's levels, by `fp8.initialize`.
        opt_level: a name in `fp8.training.levels.LEVELS`, for one model with one optimizer; None:
            no level ("O2" for "msamp"). With layers of TransformerEngine, "O1" and "O2" affect
            optimizer states only: weights and gradients stay as these layers store them.
        where: as in `fp8.convert`.

    Returns:
        The prepared objects, as Accelerate does: in their order, or the object if it is one.

    Raises:
        ValueError: for an Accelerator with mixed_precision="fp8", which would convert the model
            again; for a level with other than one model and one optimizer; for a recipe object of
            another backend; and for unsupported settings of one. Nothing is converted then.
        TypeError: if no object is a model.
        ImportError: without the libraries.
    """
    need("accelerate")
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    if not models:
        kinds = ", ".join(type(thing).__name__ for thing in objects) or "nothing"
        raise TypeError(f"prepare needs an nn.Module among its objects, got {kinds}")
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "Accelerator(mixed_precision='fp8') converts the model itself: make it with 'no' or "
            "'bf16', and give its recipe object to this function"
        )
    backend = _checked_backend(backend, recipe)
    optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
    if backend == "msamp":
        opt_level = opt_level or getattr(recipe, "opt_level", None) or "O2"
        backend = "auto"
        if not isinstance(recipe, _OURS):
            recipe = "tensor"
    if opt_level is not None and not len(models) == len(optimizers) == 1:
        raise ValueError(
            f"opt_level {opt_level!r} needs one model and its optimizer, got {len(models)} and "
            f"{len(optimizers)}: call prepare for each model"
        )
    if opt_level == "O3" and backend in ADAPTERS:
        raise ValueError(
            f"opt_level 'O3' keeps weights in FP8, which the layers of {backend!r} do not take; "
            "they have 'O1' and 'O2'"
        )
    new: dict[int, nn.Module] = {}
    try:
        for model in models:
            new[id(model)] = _converted(accelerator, model, recipe, backend, where)
        if opt_level is not None:
            initialize(new[id(models[0])], optimizers[0], opt_level, recipe=None)
    except (TypeError, ValueError):
        for model in new.values():
            revert_layers(model)
        raise
    return accelerator.prepare(*(new.get(id(thing), thing) for thing in objects))


def _checked_backend(backend: str, recipe: Kwargs) -> str:
    check_name("backend", backend, (*BACKENDS, *ADAPTERS, "msamp"))
    if isinstance(recipe, _OURS):
        return backend
    # By name, as Accelerate's classes differ between its versions.
    kinds = {cls.__name__ for cls in type(recipe).__mro__}
    wanted = next((of for name, of in _KINDS.items() if name in kinds), None)
    if "FP8RecipeKwargs" in kinds:  # covers both others; its backend says which
        wanted = {"TE": "transformer_engine", "MSAMP": "msamp"}[recipe.backend]
    kind = type(recipe).__name__
    if wanted is None:
        names = ", ".join(_KINDS)
        raise TypeError(
            f"recipe must be a name, a Recipe, a Policy or one of {names}, not {kind}"
        )
    if backend not in ("auto", wanted):
        raise ValueError(f"{kind} is for backend {wanted!r}, got {backend!r}")
    return wanted


def _converted(
    accelerator: Accelerator,
    model: nn.Module,
    recipe: Kwargs,
    backend: str,
    where: Where | None,
) -> nn.Module:
    if isinstance(recipe, _OURS):
        return convert(model, recipe, backend=backend, where=where)
    options: dict[str, Any] = {}
    if backend == "transformer_engine":
        chosen = _te(recipe)
        options["in_eval"] = bool(recipe.use_autocast_during_eval)
    else:
        chosen = recipe.config
        # Without FSDP2 it would replace parameters, to no effect.
        if not getattr(accelerator, "is_fsdp2", False):
            chosen = dataclasses.replace(chosen, enable_fsdp_float8_all_gather=False)
        where = _ao_where(model, recipe.module_filter_func, where)
    options["where"] = checked_where(where)
    return expand(adapter(backend).convert(revert_layers(model), chosen, **options))


def _te(kwargs: Kwargs) -> TERecipe:
    options = {name: getattr(kwargs, name) for name in _NOT_OF_MXFP8}
    if not kwargs.use_mxfp8_block_scaling:
        return delayed_scaling(fp8_format=kwargs.fp8_format, **options)
    for name, value in options.items():
        if value != _NOT_OF_MXFP8[name]:
            raise ValueError(f"{name}={value!r} is no option of MXFP8 block scaling")
    recipe = te_recipe("mxfp8")
    recipe.fp8_format = format_of(kwargs.fp8_format)
    return recipe


def _ao_where(
    model: nn.Module,
    chosen: Callable[[nn.Module, str], object] | None,
    where: Where | None,
) -> Where:
    """The layers that Accelerate converts: those selected, else all but the first and last."""
    if chosen is not None:
        if where is not None:
            raise ValueError(
                "give where, or AORecipeKwargs its module_filter_func, not both"
            )
        return lambda name, layer: bool(chosen(layer, name))
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return where or (lambda name, layer: name not in (names[0], names[-1]))
