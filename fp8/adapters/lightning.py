"""Lightning: plugins that train models in FP8 with its Trainer or Fabric.

trainer = Trainer(plugins=FP8Precision("unit"))
fabric = Fabric(plugins=FP8FabricPrecision("unit", precision="bf16-mixed"))
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..casts.watch import Watch
from ..common.libraries import need
from ..common.validation import check_name
from ..layers.convert import advance, convert
from ..layers.select import ADAPTERS, Where
from ..layers.settings import converted, keep_apart
from ..products.active import checked_backend
from ..recipes.history import (
    Schedule,
    add_initial_histories,
    histories,
    set_histories,
)
from ..recipes.policy import Policy, as_policy, name_of, recipe_of, source_of
from ..recipes.recipe import AUTO, PLAIN, Recipe

__all__ = ["PRECISIONS", "FP8FabricPrecision", "FP8Precision"]

PRECISIONS = {
    "32-true": "Precision",
    "16-mixed": "MixedPrecision",
    "bf16-mixed": "MixedPrecision",
    "16-true": "HalfPrecision",
    "bf16-true": "HalfPrecision",
}
"""Lightning's name of the precision outside of FP8 -> the plugin to derive from."""


def FP8Precision(
    recipe: str | Recipe | Policy = AUTO,
    *,
    precision: str = "32-true",
    backend: str = "auto",
    where: Where | None = None,
    library: str | None = None,
    **options: Any,
) -> Any:
    """A plugin for ``Trainer(plugins=...)`` that converts the model by `fp8.convert`, for training,
    validation, test and prediction.

    Checkpoints contain the plain model's state_dict and, under "FP8Precision", the recipe and the
    histories of "delayed" and "static". Loading one trained under another recipe is a UserWarning.

    Args:
        recipe, backend, where: as in `fp8.convert`. The switch of a policy is applied before
            the step that reaches its fraction of the Trainer's ``estimated_stepping_batches``.
        precision: a name in `PRECISIONS`, for everything outside of FP8; "mixed" is torch.autocast.
        library: "lightning" or "pytorch_lightning", the library of the Trainer; None: the imported
            one, "lightning" if both are.
        options: ``device`` and ``scaler`` of Lightning's MixedPrecision; device defaults to the
            device of the accelerator.

    Returns:
        The plugin.

    Raises:
        ValueError: for an unknown name.
        TypeError: for other options, and in a Fabric, whose checkpoints would lack the histories.
        ImportError: if Lightning is not installed.
    """
    make = _plugin(True, precision, library)
    return make(recipe, precision, {"backend": backend, "where": where}, options)


def FP8FabricPrecision(
    recipe: str | Recipe | Policy = AUTO,
    *,
    precision: str = "32-true",
    backend: str = "auto",
    where: Where | None = None,
    library: str | None = None,
    **options: Any,
) -> Any:
    """Returns a precision plugin for ``Fabric(plugins=...)``. ``setup`` converts the model.

    The caller writes checkpoints, and calls `fp8.advance` for the switch of a policy. With scaling
    "delayed" the histories are in the model's state_dict, as in `fp8.convert`. library: "lightning"
    or "lightning_fabric".
    """
    make = _plugin(False, precision, library)
    return make(recipe, precision, {"backend": backend, "where": where}, options)


def _plugin(of_trainer: bool, precision: str, library: str | None) -> Any:
    check_name("precision", precision, PRECISIONS)
    package = library_of(of_trainer, library)
    plugins = importlib.import_module(f"{package}.plugins.precision")
    return _kind(getattr(plugins, PRECISIONS[precision]), of_trainer)


def library_of(of_trainer: bool, library: str | None) -> str:
    """The package of Lightning's Trainer or Fabric. library: as in `FP8Precision`."""
    names = ("lightning", "pytorch_lightning" if of_trainer else "lightning_fabric")
    check_name("library", library, (None, *names))
    if library is None:
        library = next((name for name in names if name in sys.modules), names[0])
    if library == "lightning":
        need("lightning")
        library += ".pytorch" if of_trainer else ".fabric"
    return library


@functools.cache
def _kind(base: Any, of_trainer: bool) -> Any:
    name = "FP8Precision" if of_trainer else "FP8FabricPrecision"
    return type(name, (_Converting, base), {"_of_trainer": of_trainer, "_base": base})


def _blank(base: Any, of_trainer: bool) -> Any:
    return object.__new__(_kind(base, of_trainer))


class _Converting:
    """The common part of the plugins."""

    _of_trainer: bool
    _base: Any

    def __init__(
        self, recipe: Any, precision: str, how: dict[str, Any], options: Any
    ) -> None:
        policy = as_policy(recipe)
        backend = how["backend"]
        self.recipe = recipe
        if recipe is not policy:
            self.recipe = source_of(policy.recipe)
        self._how = how
        self._model: nn.Module | None = None
        if backend not in ADAPTERS:
            checked_backend(backend, recipe_of(policy.recipe) or PLAIN, ADAPTERS)
        if PRECISIONS[precision] == "MixedPrecision":
            device = torch.accelerator.current_accelerator(check_available=True)
            options = {"device": "cpu" if device is None else device.type, **options}
        elif options:
            raise TypeError(
                f"{', '.join(options)}: for a mixed precision, not for {precision!r}"
            )
        precision_option = {} if precision == "32-true" else {"precision": precision}
        super().__init__(**precision_option, **options)

    def __reduce__(self) -> Any:
        return _blank, (self._base, self._of_trainer), vars(self)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The model, converted, with its previous histories."""
        names = [cls.__name__ for cls in type(module).__mro__]
        if self._of_trainer and "LightningModule" not in names:
            raise TypeError(
                f"FP8Precision is for a Trainer; for {names[0]} take FP8FabricPrecision"
            )
        module = super().convert_module(module)  # type: ignore[misc]
        before = _copies(module)
        self._model = convert(module, self.recipe, **self._how)
        if self._of_trainer:  # a Trainer loads a state_dict before it converts
            keep_apart(self._model)
        self._remember(before)
        return self._model

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of Lightning's plugin. In a Trainer, first the switch of the policy."""
        if self._of_trainer and isinstance(self.recipe, Policy) and self.recipe.switch:
            model: Any = self._model
            trainer = model.trainer
            done = trainer.global_step / trainer.estimated_stepping_batches
            advance(model, min(done, 1.0))
        return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """The state of Lightning's plugin, the recipe, the histories and the schedule of looks."""
        ours: dict[str, Any] = {"recipe": self._in_force()}
        if self._model is not None:
            ours["histories"] = _copies(self._model)
            ours["looks"] = [list(watch.schedule) for watch in _watch_of(self._model)]
        return {**super().state_dict(), "fp8": ours}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state. Warns if the recipe was a different one."""
        now = self._in_force()
        base_state = dict(state_dict)
        ours = base_state.pop("fp8", {})
        super().load_state_dict(base_state)  # type: ignore[misc]
        trained = ours.get("recipe", now)
        if trained != now and AUTO not in (trained["name"], now["name"]):
            warnings.warn(
                f"the checkpoint was trained under the recipe {trained['name']!r}, goes on under "
                f"{now['name']!r}",
                stacklevel=2,
            )
        self._remember(ours.get("histories", {}))
        for schedule in ours.get("looks", []):
            for watch in _watch_of(self._model):
                watch.resume(Schedule(*schedule))

    def _in_force(self) -> dict[str, Any]:
        """The recipe or policy as a dict; under "auto" the recipe of the layers, if all have
        one."""
        recipe = self.recipe
        if isinstance(recipe, Policy):
            return recipe.to_dict() | {"name": name_of(recipe)}
        if recipe == AUTO and self._model is not None:
            recipes = {layer.fp8_recipe for layer in converted(self._model).values()}
            if len(recipes) == 1:
                recipe = recipes.pop()
        if isinstance(recipe, Recipe):
            return recipe.to_dict()
        return {"name": AUTO}

    def _remember(self, saved: dict[str, Tensor]) -> None:
        """Sets the histories of the model to those known, and others to zero."""
        if self._model is None:
            return
        for path, module in self._model.named_modules():
            # A layer's first pass may create them.
            add_initial_histories(module, dict(saved), path and f"{path}.")
        set_histories(self._model, saved)


def _watch_of(model: nn.Module | None) -> list[Watch]:
    """The watch of a model that is converted as a whole; none if nothing in it is converted."""
    layers = [] if model is None else list(converted(model).values())
    return [layer.fp8_watch.watch for layer in layers[:1]]


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: history.clone() for name, history in histories(model).items()}
