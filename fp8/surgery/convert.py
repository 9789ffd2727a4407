"""`convert` and `revert`: run the layers of a model under a recipe, and undo it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..casts.counts import forget_checks
from ..common.compiler import FIRST_LOOK, eager_only, taken_as_constant
from ..common.libraries import explains_arguments
from ..common.mixin import (
    Mixin,
    add_mixin,
    bare_class,
    check_module,
    check_not_scripted,
    remove_mixin,
)
from ..common.report import CHANGES, LEFT_ALONE, Report, Row, notes_on
from ..kernels.product import needs, why_not_here, why_not_recipe
from ..modes.autocast import LayerBlock, high_precision
from ..products.active import ACTIVE, checked_backend, is_off
from ..products.matmul import linear
from ..recipes import history
from ..recipes.policy import Policy, Source, as_policy, composed, name_of, recipe_of, source_of
from ..recipes.recipe import AUTO, PLAIN, STATIC, Recipe, needs_unit_scale
from ..selection.layers import (
    ADAPTERS,
    Where,
    auto_of,
    checked_where,
    has_one_product,
    has_size,
    is_transposed,
    is_unit_scaled,
    layers_of,
)
from ..selection.policies import Decision, resolve
from ..tensors.scaled_tensor import ScaledTensor
from ..warnings import RecipeWarning, warn_once
from .swap import adapted, is_replacement, warn_nothing

M = TypeVar("M", bound=nn.Module)

OVERRIDDEN = "fp8_overridden"
"""The attribute of layers in a block of `fp8.override`."""

_SET = (
    *("fp8_recipe", "fp8_sources", "fp8_asked", "fp8_backend", "fp8_why", OVERRIDDEN),
    *("fp8_transposed", "fp8_switches", "fp8_since", "fp8_policy", "fp8_apart"),
)
"""The attributes that `convert` sets on a layer or on the model, besides classes and buffers."""


def adapter(name: str) -> Any:
    """The `fp8.adapters` module of a backend of ADAPTERS, imported on first use."""
    return importlib.import_module(f"fp8.adapters.{name}")


class Converted(Mixin):
    """A layer whose products run under its ``fp8_recipe``."""

    fp8_recipe: Recipe
    #: What its casts are taken from, in the order of `CASTS`; "auto" is not resolved.
    fp8_sources: tuple[Source, ...]
    #: The backend that the user asked for, and "simulate" if the recipe has no kernels for it.
    fp8_asked: str
    fp8_backend: str
    #: The rule that decided, or why the layer does not have the recipe of the chosen layers.
    fp8_why: str
    #: Whether a switch of the policy concerns it.
    fp8_switches: bool
    fp8_transposed: bool
    fp8_measured: history.MeasuredScales

    def around(self: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if ACTIVE.blocks and is_off():
            return forward(*args, **kwargs)
        if "parametrizations" in self._modules:  # which may be newer than the conversion
            _leave_parametrizations(self)
        state = history.LayerState(self) if self.fp8_recipe.keeps_history else None
        # A linear layer runs without a mode unless another mode must see its call. That is faster,
        # and it can be compiled inside of a checkpoint.
        alone = state is None and self._active == (Converted,) and not FIRST_LOOK.items
        one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        is_linear = self._original is nn.Linear or self.fp8_transposed
        if alone and one and is_linear and args[0].layout == torch.strided:
            weight = self.weight.mT if self.fp8_transposed else self.weight
            how: Any = {"recipe": self.fp8_recipe, "backend": self.fp8_backend}
            return linear(args[0], weight, self.bias, **how)
        with LayerBlock(self.fp8_recipe, self.fp8_backend, state):
            return forward(*args, **kwargs)

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Leaves the state of scales out of the state_dict after `keep_apart`."""
        apart = "fp8_apart" in vars(self) and history.is_history(name)
        super().register_buffer(name, tensor, persistent and not apart)  # type: ignore[misc]

    @taken_as_constant
    def fp8_note(self: Any, buffer: str) -> bool:
        """`note_scale` for a buffer, in eager mode and while a graph that reads it is traced."""
        history.note_scale(self, buffer)
        return True

    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        if any(key.startswith(prefix + "fp8_scale_") for key in state_dict):
            choose_static(self)
        if "fp8_apart" not in vars(self):
            history.add_initial_histories(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
        history.note_scales(self)

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Leaves the state of scales in float32; zero where the meta device had no values, as
        `to_empty` would leave what the memory holds."""
        states = {n: b for n, b in self.named_buffers(recurse=False) if history.is_history(n)}
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for name, state in states.items():
            moved = self._buffers[name]
            if state.is_meta and not moved.is_meta:
                moved.zero_()
            elif moved.dtype != state.dtype:
                self._buffers[name] = state.to(moved.device)
        return result

    def extra_repr(self) -> str:
        settings = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, [settings, f"fp8={self.fp8_recipe.name}"]))


class _Expanded(Mixin):
    """A container that calls its layers in evaluation mode too."""

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        with nullcontext() if ACTIVE.blocks else high_precision():
            return forward(*args, **kwargs)


class _OfParameters(Mixin):
    """The computation of a parametrized weight: its products are not those of the layer."""

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        with high_precision() if ACTIVE.blocks else nullcontext():
            return forward(*args, **kwargs)


@eager_only()
def _leave_parametrizations(layer: nn.Module) -> None:
    """Leaves the products that compute the weights of a layer in high precision."""
    computed: Any = layer._modules.get("parametrizations") or {}
    for part in computed.values():
        add_mixin(part, _OfParameters)


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
    zeros. A layer of several products creates its buffers in its first pass, in eager mode.

    Args:
        model: converted in place.
        recipe: a name in `fp8.RECIPES`, a `Recipe`, or "auto": "unit" for each layer that is
            of `unit_scaling.modules`, "static" for those of a model of `unit_scale` (before or
            after this call) and once `fp8.calibrate` has set their scales, "tensor" for others and
            for layers of other libraries. Or a `fp8.Policy`, which selects the recipe of each layer
            by its name and role.
        backend: as in `fp8.autocast`. Convolutions, and recipes and weight sizes that the kernels
            do not support, are simulated. "transformer_engine" or "torchao" replaces the layers
            with those of that library (`fp8.adapters`); if the model is itself such a layer, use
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
    policy, where = as_policy(recipe), checked_where(where)
    if backend in ADAPTERS:
        return _adapt(model, policy, adapter(backend), where)
    checked_backend(backend, recipe_of(policy.recipe) or PLAIN, ADAPTERS)
    model = _without_adapters(model)
    decisions = resolve(policy.at(0), model)  # raises before anything changes
    for start, _ in policy.switch:
        resolve(policy.at(start), model)
    layers = {name: model.get_submodule(name) for name in decisions}
    chosen = {name for name, layer in layers.items() if where is None or where(name, layer)}
    model = revert_layers(model)
    for name, module in layers.items():
        decision = decisions[name]
        if why := _why_left(module, decision) if name in chosen else "not chosen":
            vars(module)["fp8_why"] = why
            continue
        add_mixin(module, Converted)
        vars(module).update(
            fp8_sources=decision.sources,
            fp8_asked=backend,
            fp8_why=decision.why,
            fp8_transposed=is_transposed(module),
            fp8_switches=not decision.kept,
        )
        _leave_parametrizations(module)
        set_recipe(module, decision.sources)
    if isinstance(recipe, Policy):
        vars(model)["fp8_policy"] = policy
    forget_checks(model)
    _warn(model)
    return expand(model)


def _why_left(module: nn.Module, decision: Decision) -> str:
    """Why a layer is not converted; "" if it is."""
    if composed(decision.sources, PLAIN) is None:
        return decision.why
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
            raise ValueError(f"{path} has no weight yet: call the model once, then convert it")


def _without_adapters(model: M) -> M:
    """``model``, with its own layers if those of another library replaced them."""
    return revert_layers(model) if any(map(adapted, model.modules())) else model


def _adapt(model: M, policy: Policy, adapter: Any, where: Where | None) -> M:
    base = recipe_of(policy.recipe)
    if not policy.selects and base is not None:
        adapter.its_recipe(base)  # raises before anything changes
    model = _without_adapters(model)
    decisions = resolve(policy, model)
    recipes = {r for d in decisions.values() if (r := composed(d.sources, PLAIN)) is not None}
    recipes = recipes or ({base} if base else set())
    if len(recipes) != 1 or policy.switch:
        got = ", ".join(sorted(repr(recipe.name) for recipe in recipes)) or "none"
        switch = ", and a switch" if policy.switch else ""
        raise ValueError(
            f"the layers of another library take one recipe; the policy gives {got}{switch}. "
            "Convert with a backend of this library, or see fp8.adapters.policies"
        )
    chosen = recipes.pop()
    adapter.its_recipe(chosen)
    model = revert_layers(model)
    in_high_precision = {name for name, d in decisions.items() if d.recipe is None}

    def casts(name: str, module: nn.Module) -> bool:
        return name not in in_high_precision and (where is None or where(name, module))

    return expand(adapter.convert(model, chosen, where=casts))


def set_recipe(module: nn.Module, sources: tuple[Source, ...]) -> None:
    """Sets the recipe of a converted layer, its backend, and the buffers that it needs."""
    recipe = composed(sources, auto_of(module)) or _HIGH
    backend = vars(module)["fp8_asked"]
    runs = "simulate" if why_not_recipe(composed(sources, PLAIN) or _HIGH) else backend
    vars(module).update(fp8_recipe=recipe, fp8_backend=runs)
    if recipe.keeps_history:
        history.add_buffers(module, recipe, not has_one_product(module))


def keep_apart(model: nn.Module) -> None:
    """Leaves the state of scales out of the state_dict, which then is that of the plain model."""
    for module in model.modules():
        if isinstance(module, Converted):
            vars(module)["fp8_apart"] = True
            for name, buffer in list(module.named_buffers(recurse=False)):
                if history.is_history(name):
                    module.register_buffer(name, buffer)


_HIGH = Recipe(name="high precision")
"""The recipe of a converted layer whose casts a switch turned off."""


def advance(model: nn.Module, fraction: float) -> bool:
    """Applies the switch of the policy that ``model`` was converted with.

    Call it before each step. Layers keep weights and buffers; those in high precision stay so. It
    goes back, too, after an earlier checkpoint is loaded. A compiled model is compiled again.

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
    owners = [m for m in model.modules() if vars(m).get("fp8_policy", Policy()).switch]
    if not owners:
        raise ValueError(
            "no part of the model was converted with a policy that has a switch: "
            "fp8.convert(model, fp8.Policy(recipe, switch=[(0.9, 'bf16')]))"
        )
    if any(map(is_overridden, model.modules())):
        raise RuntimeError("fp8.advance belongs outside of fp8.override: close the block first")
    changed = [_advance(owner, fraction) for owner in owners]
    return any(changed)


def is_overridden(module: nn.Module) -> bool:
    """Whether a block of `fp8.override` is open for a layer."""
    return OVERRIDDEN in vars(module)


def _advance(owner: nn.Module, fraction: float) -> bool:
    policy: Policy = vars(owner)["fp8_policy"]
    policy.at(fraction)  # checks the fraction
    reached = [(start, source_of(recipe)) for start, recipe in policy.switch if start <= fraction]
    since = reached[-1][0] if reached else None
    if vars(owner).get("fp8_since") == since:
        return False
    vars(owner)["fp8_since"] = since
    for module in owner.modules():
        if isinstance(module, Converted) and module.fp8_switches:
            now = module.fp8_sources
            for _, source in reached:
                now = tuple(None if was is None else source for was in now)
            set_recipe(module, now)
            shown = "" if since is None else f"since {since:g} of the training"
            vars(module)["fp8_since"] = shown
    forget_checks(owner)
    return True


def choose_recipes(model: nn.Module) -> None:
    """Selects the recipe of layers under "auto" again, when a model becomes unit-scaled, and
    forgets the state of scales, which is that of other values."""
    for module in model.modules():
        if not isinstance(module, Converted):
            continue
        if AUTO in module.fp8_sources:
            vars(module)["fp8_recipe"] = composed(module.fp8_sources, auto_of(module))
        history.remove_buffers(module)
        if module.fp8_recipe.keeps_history:
            history.add_buffers(module, module.fp8_recipe, not has_one_product(module))
    forget_checks(model)


def choose_static(module: nn.Module) -> None:
    """Selects "static" for a layer under "auto" that is not unit-scaled, for calibration."""
    auto = isinstance(module, Converted) and set(module.fp8_sources) == {AUTO}
    if auto and vars(module)["fp8_recipe"] == PLAIN:
        vars(module)["fp8_recipe"] = STATIC
        history.add_buffers(module, STATIC, not has_one_product(module))


def _warn(model: nn.Module) -> None:
    layers: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, Converted)}
    unscaled = [
        (layer.fp8_recipe.name, name or "(model)")
        for name, layer in layers.items()
        if needs_unit_scale(layer.fp8_recipe) and not is_unit_scaled(layer)
    ]
    if unscaled:
        (recipe, name), count = unscaled[0], f"{len(unscaled)} of {len(layers)}"
        message = (
            f"recipe {recipe!r}, given by name, casts without scales, and {count} converted layers "
            f"are not unit-scaled (the first is {name!r}): their small weights and gradients "
            'become zero. It is for modules of unit_scaling: use "auto" (the default) or "tensor"'
        )
        warn_once(RecipeWarning, message, model)
    if not any(layer.fp8_switches for layer in layers.values()):
        warn_nothing(model, _rows_of_layers(model))


def expand(model: M) -> M:
    """Makes containers call their layers, if any of those was converted: in evaluation mode they
    run one fused kernel instead, unless under a torch-function mode; a disabled block is one."""
    for module in model.modules():
        changed = (isinstance(m, Converted) or is_replacement(m) for m in module.modules())
        fast = isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer)
        if fast and any(changed):
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
        remove_mixin(module, _OfParameters)
        if isinstance(module, Converted):
            remove_mixin(module, Converted)
            history.remove_buffers(module)
        for key in _SET:
            vars(module).pop(key, None)
    return model


def report(model: nn.Module) -> Report[Row]:
    """Lists every layer with a weight: converted, and to which recipe, or left alone, and why. If
    norms are in low precision, lists every norm as well.

    Args:
        model: a model, converted or not.

    Returns:
        A report with one row per layer. A layer with several names appears under the first.
    """
    check_module("report", model)
    note, others = adapted(model), [row for c in CHANGES for row in c.rows(model)]
    if note is not None:
        return Report([*note.report, *others], notes_on(model))
    notes, policy = [*notes_on(model)], vars(model).get("fp8_policy", Policy())
    starts = [f"{name_of(to)} from {start:g} of the training" for start, to in policy.switch]
    if policy.name or starts:
        name = f"policy {policy.name!r}" if policy.name else "policy"
        notes.append("; ".join([name, *starts]))
    return Report([*_rows_of_layers(model), *others], notes)


def _rows_of_layers(model: nn.Module) -> list[Row]:
    rows = []
    for name, module, why_not in layers_of(model):
        kind = bare_class(module).__name__
        if isinstance(module, Converted):
            rows.append(Row(name, kind, "converted", _how(module)))
        else:
            why = why_not or vars(module).get("fp8_why") or _why_unchosen(module)
            rows.append(Row(name, kind, LEFT_ALONE, why))
    return rows


def _why_unchosen(module: nn.Module) -> str:
    weight = vars(module)["_parameters"].get("weight")
    if isinstance(weight, ScaledTensor) and not weight.requires_grad:
        return f"frozen: its weight is stored in {weight.format}, its products are not cast"
    return "not chosen"


def _how(module: Any) -> str:
    """The recipe of a converted layer and, unless all is simulated, the backend of its products."""
    recipe, backend = module.fp8_recipe, module.fp8_backend
    state = "calibrated" if recipe == STATIC else "not unit-scaled"
    if is_unit_scaled(module) or has_size(module):
        state = "unit-scaled"
    since = vars(module).get("fp8_since", "")
    auto = f"{AUTO}: {state}" if AUTO in module.fp8_sources and not since else ""
    why = "; ".join(filter(None, [auto, module.fp8_why, since]))
    name = f"{recipe.name} ({why})" if why else recipe.name
    none = "" if module.fp8_asked == "simulate" else why_not_recipe(recipe)
    if backend == "simulate":
        return f"{name}, simulated: {none}" if none else str(name)
    if not (isinstance(module, nn.Linear) or module.fp8_transposed):
        return f"{name}, simulated: the kernels multiply two matrices"
    weight, (multiple, devices) = module.weight, needs(recipe)
    odd = [size for size in reversed(weight.shape) if size % multiple]
    if odd:
        return f"{name}, simulated: {odd[0]} is no multiple of {multiple}"
    predicted = backend == "auto" and weight.device.type != "cuda"
    if not predicted and (why := why_not_here(recipe, weight.device, weight.dtype)):
        return f"{name}, simulated: {why}"
    return f"{name}, native on {devices}" if predicted else f"{name}, native"
