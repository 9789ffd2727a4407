"""A converted layer: what it was told, and the mixin that computes its products."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..casts.counts import forget_checks
from ..casts.watch import LayerWatch, Watch
from ..common.compiler import eager_only
from ..common.mixin import Args, Forward, Mixin, add_mixin, bare_class
from ..frame import FRAMES
from ..kernels.product import why_not_recipe
from ..modes.autocast import LayerBlock, high_precision, refuse_recomputation
from ..products.active import is_off
from ..products.matmul import linear
from ..recipes import history
from ..recipes.policy import Policy, Sources, composed
from ..recipes.recipe import AUTO, PLAIN, STATIC, Recipe
from ..torch_internals.decorators import taken_as_constant
from .policies import Decision
from .select import auto_of, has_one_product, is_transposed

HIGH_PRECISION = Recipe(name="high precision")
"""The recipe of a converted layer whose casts a switch or a block turned off."""

OVERRIDDEN = "fp8_overridden"
"""The attribute of layers in a block of `fp8.override`."""


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What a converted layer was told: its attribute ``fp8_settings``. Every change sets another
    record. The state of its scales is in buffers.

    Attributes:
        sources: what its casts are taken from; "auto" is not resolved.
        asked: the backend that the user asked for.
        why: the rules of the policy that decided; "" if it was the policy's recipe.
        decisions: the decisions of the policy, as `decisions_of` returns them; ``sources`` and
            ``why`` belong to the one in force.
        is_linear: whether its forward pass is F.linear alone, with the weight or its transpose.
        is_transposed: whether its weight is (in, out).
        by_call: whether it computes several products. Its first pass creates the buffers of each.
        saves_scales: whether the state of its scales is in the state_dict.
        recipe: the recipe in force, of its sources, of a switch or of the open blocks.
        backend: the backend in force: as asked, and "simulate" if the recipe has no kernels.
        since: what changed the recipe after the conversion, for reports.
        start: the `Decision.start` of the decision in force.
    """

    sources: Sources
    asked: str = "simulate"
    why: str = ""
    decisions: tuple[Decision, ...] = ()
    is_linear: bool = False
    is_transposed: bool = False
    by_call: bool = False
    saves_scales: bool = True
    recipe: Recipe = HIGH_PRECISION
    backend: str = "simulate"
    since: str = ""
    start: float = 0.0

    @property
    def switches(self) -> bool:
        """Whether a switch of the policy changes what is cast."""
        return len({decision.sources for decision in self.decisions}) > 1


class Converted(Mixin):
    """A layer whose products run under its recipe."""

    _attributes = ("fp8_settings", "fp8_watch", "fp8_measured", "_buffers")

    fp8_settings: LayerSettings
    fp8_watch: LayerWatch
    fp8_measured: history.MeasuredScales

    @property
    def fp8_recipe(self) -> Recipe:
        return self.fp8_settings.recipe

    def around(self: Any, forward: Forward, args: Args, kwargs: Any) -> Any:
        frame = FRAMES.items[-1]
        if frame.block is not None and is_off():
            return forward(*args, **kwargs)
        # They may be newer than the conversion.
        if "parametrizations" in self._modules:
            leave_parametrizations(self)
        settings = self.fp8_settings
        recipe = settings.recipe
        backend = settings.backend
        state = history.LayerState(self)
        # A linear layer runs without a mode unless another mode must see its call. That is faster,
        # and it can be compiled inside of a checkpoint.
        alone = settings.is_linear and not frame.early_modes
        if alone and self._active == (Converted,) and len(args) == 1 and not kwargs:
            x = args[0]
            if isinstance(x, Tensor) and x.layout == torch.strided:
                if recipe.changes_scales:
                    refuse_recomputation(recipe)
                weight = self.weight.mT if settings.is_transposed else self.weight
                return linear(
                    x, weight, self.bias, recipe=recipe, backend=backend, state=state
                )
        with LayerBlock(recipe, backend, state):
            return forward(*args, **kwargs)

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Leaves the state of scales out of the state_dict after `keep_apart`."""
        saved = self.fp8_settings.saves_scales or not history.is_history(name)
        super().register_buffer(name, tensor, persistent and saved)  # type: ignore[misc]

    @taken_as_constant
    def fp8_runs(self) -> bool:
        """Notes the place of the layer, in eager mode and while a graph that looks is traced."""
        self.fp8_watch.watch.runs(self.fp8_watch)
        return True

    @taken_as_constant
    def fp8_note(self: Any, buffer: str) -> bool:
        """`note_scale` for a buffer, in eager mode and while a graph that reads it is traced."""
        history.note_scale(self, buffer)
        return True

    def _save_to_state_dict(self, *args: Any) -> None:
        history.write_schedule(self, self.fp8_watch.watch.schedule)  # type: ignore[arg-type]
        super()._save_to_state_dict(*args)  # type: ignore[misc]

    def _load_from_state_dict(
        self: Any, state_dict: Any, prefix: str, *args: Any
    ) -> None:
        if any(key.startswith(prefix + "fp8_scale_") for key in state_dict):
            choose_static(self)
        # A state_dict that was saved after a switch has the buffers of its recipe.
        for decision in self.fp8_settings.decisions[1:]:
            recipe = composed(decision.sources, auto_of(self))
            if recipe and history.is_saved(self, recipe, state_dict, prefix):
                history.add_buffers(self, recipe)
        if self.fp8_settings.saves_scales:
            history.add_initial_histories(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
        history.note_scales(self)
        schedule = history.read_schedule(self)
        if schedule is not None and prefix + history.LOOKS in state_dict:
            self.fp8_watch.watch.resume(schedule)

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Leaves the state of scales in float32; zero where the meta device had no values, as
        `to_empty` would leave what the memory holds."""
        states = {
            n: b for n, b in self.named_buffers(recurse=False) if history.is_history(n)
        }
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for name, state in states.items():
            moved = self._buffers[name]
            if state.is_meta and not moved.is_meta:
                moved.zero_()
            elif moved.dtype != state.dtype:
                self._buffers[name] = state.to(moved.device)
        self.fp8_watch.drop()
        if not self.fp8_settings.by_call:
            self.fp8_watch.add("", self.weight.device)
        return result

    def extra_repr(self) -> str:
        settings = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, [settings, f"fp8={self.fp8_recipe.name}"]))


def converted(model: nn.Module) -> dict[str, Any]:
    """Name -> layer, of the converted layers of a model."""
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, Converted)
    }


def policy_of(model: nn.Module) -> Policy:
    """The policy that a model or a part was converted with; the default one without."""
    return vars(model).get("fp8_policy", Policy())


class OfParameters(Mixin):
    """The computation of a parametrized weight, whose products are not the layer's."""

    def around(self, forward: Forward, args: Args, kwargs: Any) -> Any:
        if FRAMES.items[-1].block is None:
            return forward(*args, **kwargs)
        with high_precision():
            return forward(*args, **kwargs)


@eager_only()
def leave_parametrizations(layer: nn.Module) -> None:
    """Leaves the products that compute the weights of a layer in high precision."""
    computed: Any = layer._modules.get("parametrizations") or {}
    for part in computed.values():
        add_mixin(part, OfParameters)


def convert_layer(
    layer: nn.Module,
    decisions: tuple[Decision, ...],
    backend: str,
) -> None:
    """Converts one layer, as a policy has decided."""
    transposed = is_transposed(layer)
    decision = decisions[0]
    settings = LayerSettings(
        sources=decision.sources,
        asked=backend,
        why=decision.why,
        decisions=decisions,
        is_linear=transposed or bare_class(layer) is nn.Linear,
        is_transposed=transposed,
        by_call=not has_one_product(layer),
    )
    vars(layer)["fp8_settings"] = settings
    add_mixin(layer, Converted)
    leave_parametrizations(layer)
    set_recipe(layer, decision.sources)


def change_settings(layer: Any, **fields: Any) -> None:
    """Sets a record of a converted layer with other ``fields``."""
    vars(layer)["fp8_settings"] = settings = replace(layer.fp8_settings, **fields)
    if "fp8_watch" in vars(layer):
        layer.fp8_watch.under(settings.recipe)


def set_recipe(layer: Any, sources: Sources, since: str = "") -> None:
    """Sets the recipe of a converted layer, its backend, and the buffers that it needs."""
    recipe = composed(sources, auto_of(layer)) or HIGH_PRECISION
    backend = layer.fp8_settings.asked
    # "auto" may become another recipe after the conversion: "tensor" stands for it here.
    if why_not_recipe(composed(sources, PLAIN) or HIGH_PRECISION):
        backend = "simulate"
    change_settings(layer, recipe=recipe, backend=backend, since=since)
    history.add_buffers(layer)


def switch_layer(layer: Any, fraction: float) -> bool:
    """Applies the decision that holds after ``fraction`` of the training. Returns whether it has
    other sources or rules than the one before."""
    before = layer.fp8_settings
    for decision in before.decisions:
        if decision.start <= fraction:
            latest = decision
    if latest.start == before.start:
        return False
    change_settings(layer, sources=latest.sources, why=latest.why, start=latest.start)
    if (latest.sources, latest.why) == (before.sources, before.why):
        return False
    since = f"since {latest.start:g} of the training" if latest.start else ""
    set_recipe(layer, latest.sources, since)
    return True


def watch_layers(model: nn.Module) -> None:
    """Gives the converted layers of a model a watch, which looks at the next passes as at the first
    ones, under the recipes that are in force now. Products outside of layers are checked again."""
    forget_checks(model)
    layers = converted(model)
    found = [vars(layer).get("fp8_watch") for layer in layers.values()]
    watch = next((layer.watch for layer in found if layer is not None), None) or Watch()
    watch.resume(history.Schedule())
    watch.model = weakref.ref(model)
    for name, layer in layers.items():
        if "fp8_watch" not in vars(layer):
            vars(layer)["fp8_watch"] = LayerWatch(name, watch)
        watched = layer.fp8_watch
        watched.layer = weakref.ref(layer)
        watched.join(watch)  # of a part that was converted on its own
        watched.under(layer.fp8_recipe)
        if not layer.fp8_settings.by_call and not watched.tables():
            watched.add("", layer.weight.device)


def choose_static(layer: Any) -> None:
    """Selects "static" for a layer under "auto" that is not unit-scaled, for calibration."""
    settings = layer.fp8_settings
    if set(settings.sources) == {AUTO} and settings.recipe == PLAIN:
        change_settings(layer, recipe=STATIC)
        history.add_buffers(layer)


def keep_apart(model: nn.Module) -> None:
    """Leaves the state of scales out of the state_dict, which then equals the plain model's."""
    for layer in converted(model).values():
        change_settings(layer, saves_scales=False)
        for name, buffer in list(layer.named_buffers(recurse=False)):
            if history.is_history(name):
                layer.register_buffer(name, buffer)
