"""`convert` and `revert`: run the layers of a model under a recipe, and undo it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from ..common.libraries import explains_arguments
from ..common.mixin import (
    Args,
    Forward,
    Mixin,
    add_mixin,
    check_not_scripted,
    remove_mixin,
)
from ..common.report import CHANGES
from ..common.validation import check_module
from ..frame import FRAMES
from ..modes.autocast import high_precision
from ..products.active import checked_backend
from ..recipes import history
from ..recipes.policy import Policy, as_policy, composed, recipe_of
from ..recipes.recipe import AUTO, PLAIN, Recipe, needs_unit_scale
from ..torch_internals import Keywords
from ..warnings import RecipeWarning, warn_once
from .adapters import adapted, adapter, check_base, decided, is_replacement
from .policies import Decision, decisions_of
from .select import ADAPTERS, Where, auto_of, checked_where, is_unit_scaled
from .settings import (
    OVERRIDDEN,
    Converted,
    OfParameters,
    change_settings,
    convert_layer,
    converted,
    policy_of,
    switch_layer,
    watch_layers,
)

M = TypeVar("M", bound=nn.Module)

#: The attributes that `convert` sets on layers and on the model, besides classes and buffers: of a
#: layer that stays, why; of the model, its policy.
_SET = (
    "fp8_settings",
    "fp8_watch",
    OVERRIDDEN,
    "fp8_why",
    "fp8_policy",
)


class _Expanded(Mixin):
    """A container that calls its layers in evaluation mode too."""

    def around(self, forward: Forward, args: Args, kwargs: Keywords) -> Any:
        with high_precision() if FRAMES.items[-1].block is None else nullcontext():
            return forward(*args, **kwargs)


@explains_arguments
def convert(
    model: M,
    recipe: str | Recipe | Policy = AUTO,
    *,
    backend: str = "auto",
    where: Where | None = None,
) -> M:
    """Converts the layers of ``model`` to compute their products under ``recipe``.

    Layers (`LAYERS`) are converted in place. Their type, names, parameters, ties, dtype, device and
    hooks stay the same. A model that is already converted gets the new recipe. `report` lists every
    layer and why it is not converted; `revert` undoes the conversion. Products outside of layers
    (attention, `@`) stay in high precision; run the model under `fp8.autocast` for those.

    Recipes with scaling "delayed" and "static" keep their state in buffers of the layer, which are
    part of the state_dict: convert a model before loading them. "delayed" has histories,
    ``fp8_amax_input`` and so on, newest entry first; each pass that records gradients adds one
    unless it is zero, Inf or NaN. "static" has scales, ``fp8_scale_input`` and so on, 0 until
    `fp8.calibrate` sets them, or the first training step in which the operand is finite and not all
    zeros, and ``fp8_looks``, the pass that measures them next. A layer of several products creates
    its buffers in its first pass, in eager mode.

    Args:
        model: converted in place.
        recipe: a name in `fp8.RECIPES`, a `Recipe`, or "auto": "unit" for each layer that is
            of `unit_scaling.modules`, "static" for layers of a model of `unit_scale` (before or
            after this call) and once `fp8.calibrate` has set their scales, "tensor" for others and
            for layers of other libraries. Or a `fp8.Policy`, which selects the recipe of each layer
            by its name and role.
        backend: as in `fp8.autocast`. Convolutions, and recipes and weight sizes that the kernels
            do not support, are simulated. "transformer_engine" or "torchao" replaces the layers
            with layers of that library (`fp8.adapters`); if the model is itself such a layer, use
            the return value.
        where: (name, layer) -> whether to convert it; None: every layer.

    Returns:
        ``model``, or the layer that replaces it.

    Warns:
        RecipeWarning: if a recipe without scales ("unit") is given by name to layers that are no
            modules of `unit_scaling`.
        ConvertWarning: if no layer is chosen and converted.

    Raises:
        TypeError: if ``model`` is no module or contains TorchScript; if ``where`` is no function or
            returns no bool.
        ValueError: for an unknown recipe or backend; for a rule of a policy that matches no layer;
            for a lazy layer that has no weight yet; for "native" with a recipe that has no kernels;
            for the layers of another library with a policy of several recipes or with a switch.
        NotImplementedError: in the forward pass, if a layer with scaling "delayed" is checkpointed
            with ``use_reentrant=False``.

    >>> import torch, fp8
    >>> model = fp8.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    >>> print(fp8.report(model))
    module  type    done       why
    0       Linear  converted  tensor (auto: not unit-scaled), simulated: 4 is no multiple of 16
    <BLANKLINE>
    1 converted
    """
    check_module("convert", model)
    check_ready(model)
    policy = as_policy(recipe)
    where = checked_where(where)
    is_library = backend in ADAPTERS
    if is_library:
        check_base(backend, policy)  # raises before anything changes
    else:
        checked_backend(backend, recipe_of(policy.recipe) or PLAIN, ADAPTERS)
    if any(map(adapted, model.modules())):
        model = revert_layers(model)
    if is_library:
        one, casts = decided(backend, policy, model, where)
        return expand(adapter(backend).convert(revert_layers(model), one, where=casts))
    decisions = decisions_of(policy, model)  # raises before anything changes
    layers = {name: model.get_submodule(name) for name in decisions}
    # Before anything changes, as `where` may raise.
    chosen = {n for n, layer in layers.items() if where is None or where(n, layer)}
    model = revert_layers(model)
    for name, module in layers.items():
        why = _why_left(module, decisions[name]) if name in chosen else "not chosen"
        if why:
            vars(module)["fp8_why"] = why
        else:
            convert_layer(module, decisions[name], backend)
    if isinstance(recipe, Policy):
        vars(model)["fp8_policy"] = policy
    watch_layers(model)
    _warn(model)
    return expand(model)


def _why_left(module: nn.Module, decisions: tuple[Decision, ...]) -> str:
    """Why a layer is not converted; "" if it is, as a decision, now or after a switch, casts."""
    if all(composed(decision.sources, PLAIN) is None for decision in decisions):
        return decisions[0].why
    is_attention = isinstance(module, nn.MultiheadAttention)
    if is_attention and (module.bias_k is not None or module.add_zero_attn):
        return "add_bias_kv and add_zero_attn are not supported"
    return ""


def check_ready(model: nn.Module) -> None:
    """Raises TypeError for TorchScript, ValueError for a lazy layer without a weight."""
    for name, module in model.named_modules():
        check_not_scripted(name, module)
        if any(map(is_lazy, module.parameters(recurse=False))):
            path = name or type(module).__name__
            raise ValueError(
                f"{path} has no weight yet: call the model once, then convert it"
            )


def advance(model: nn.Module, fraction: float) -> bool:
    """Applies the switch of the policy that ``model`` was converted with.

    Call it before each step. Layers keep weights and buffers. It goes back, too, after an earlier
    checkpoint is loaded. A compiled model is compiled again.

    Args:
        model: the converted model, or a module that contains it.
        fraction: the share of the training steps that are done, from 0 to 1.

    Returns:
        Whether recipes changed.

    Raises:
        TypeError: if ``model`` is not a module or ``fraction`` is not a number.
        ValueError: for a fraction outside of 0 to 1; if no policy of the model has a switch.
        RuntimeError: inside of `fp8.override`.

    >>> import torch, fp8
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    >>> _ = fp8.convert(model, fp8.Policy("mxfp8", switch=[(0.9, "bf16")]))
    >>> fp8.advance(model, 0.5), fp8.advance(model, 0.95), model[0]
    (False, True, Linear(in_features=16, out_features=16, bias=True, fp8=bf16))
    """
    check_module("advance", model)
    owners = [module for module in model.modules() if policy_of(module).switch]
    if not owners:
        raise ValueError(
            "no part of the model was converted with a policy that has a switch: "
            "fp8.convert(model, fp8.Policy(recipe, switch=[(0.9, 'bf16')]))"
        )
    if any(OVERRIDDEN in vars(module) for module in model.modules()):
        raise RuntimeError(
            "fp8.advance belongs outside of fp8.override: close the block first"
        )
    changed = False
    for owner in owners:
        policy_of(owner).at(fraction)  # checks the fraction
        layers = converted(owner).values()
        # All are switched, whatever the first one returns.
        switched = [switch_layer(layer, fraction) for layer in layers]
        if any(switched):
            watch_layers(owner)
            changed = True
    return changed


def choose_recipes(model: nn.Module) -> None:
    """Selects the recipe of layers under "auto" again, when a model becomes unit-scaled, and
    forgets the state of scales, which was measured on other values."""
    for layer in converted(model).values():
        sources = layer.fp8_settings.sources
        if AUTO in sources:
            change_settings(layer, recipe=composed(sources, auto_of(layer)))
        # Scales of the values that the model had before do not hold.
        history.remove_buffers(layer)
        history.add_buffers(layer)
    watch_layers(model)


def _warn(model: nn.Module) -> None:
    layers = converted(model)
    unscaled = [
        name
        for name, layer in layers.items()
        if needs_unit_scale(layer.fp8_recipe) and not is_unit_scaled(layer)
    ]
    if unscaled:
        name = unscaled[0]
        count = f"{len(unscaled)} of {len(layers)}"
        recipe = layers[name].fp8_recipe.name
        message = (
            f"recipe {recipe!r}, given by name, casts without scales, and {count} converted layers "
            f"are not unit-scaled (the first is {name or '(model)'!r}): their small weights and "
            'gradients become zero. It is for modules of unit_scaling: use "auto" (the default) '
            'or "tensor"'
        )
        warn_once(RecipeWarning, message, model)
    if all(layer.fp8_settings.decisions[0].kept for layer in layers.values()):
        from .report import rows_of_layers, warn_nothing  # imported on first use

        warn_nothing(model, rows_of_layers(model))


def expand(model: M) -> M:
    """Makes containers call their layers, if any of those was converted: in evaluation mode they
    run one fused kernel instead, unless under a torch-function mode; a disabled block is one."""
    # torch.nn's "fast path": it reads the weights of the layers inside, and calls none of them.
    fast = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
    for module in model.modules():
        if isinstance(module, fast):
            parts = module.modules()
            if any(isinstance(m, Converted) or is_replacement(m) for m in parts):
                add_mixin(module, _Expanded)
    return model


def revert(model: M) -> M:
    """Undoes `convert` and `fp8.apply_low_precision_layernorm` in place; weights stay as they are.

    Args:
        model: a model, converted or not.

    Returns:
        ``model``; for a single layer that an adapter replaced, the layer that takes its place.
    """
    check_module("revert", model)
    for change in CHANGES:
        change.revert(model)
    return revert_layers(model)


def revert_layers(model: M) -> M:
    """`revert` for layers alone: norms stay in the precision they are in."""
    notes = [note for module in model.modules() if (note := adapted(module))]
    for name in {note.adapter for note in notes}:
        model = adapter(name).revert(model)
    for module in model.modules():
        remove_mixin(module, _Expanded)
        remove_mixin(module, OfParameters)
        if isinstance(module, Converted):
            remove_mixin(module, Converted)
            history.remove_buffers(module)
        for key in _SET:
            vars(module).pop(key, None)
    return model
