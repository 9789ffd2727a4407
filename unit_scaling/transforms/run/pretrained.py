"""Saving and loading unit-scaled models of the library transformers.

The saved configuration has a ``quantization_config`` with ``quant_method`` "unit_scale" and the
plan. ``from_pretrained`` restores the transform if the method is registered. Otherwise transformers
would skip it with a warning and load the weights into the plain model. To prevent this, the name of
the weights file in the configuration is invalid and says what to do.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fp8.adapters.transformers import is_pretrained
from fp8.common.libraries import need
from fp8.common.mixin import Mixin, add_mixin

from ..plan.plan import ModelPlan
from ..state import EXTRA_STATE, MARKER, scaling

Restore = Callable[[nn.Module, ModelPlan], None]
"""Makes a model with unit-scaled weights unit-scaled in place, according to a plan."""

METHOD = "unit_scale"
"""The ``quant_method``."""

_KEYS = {MARKER, EXTRA_STATE}
"""The keys of a state_dict that are not weights."""

_STOP = (
    "none, as these weights are those of a unit-scaled model. Call "
    "unit_scaling.register_transformers() before from_pretrained, or save unit_scaling.fold(model)"
)
"""Replaces the file name that transformers shows in its error."""


class Pretrained(Mixin):
    """A model that saves its transform."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers. The configuration has the plan, unless ``state_dict`` has the weights
        of another model.
        """
        model: Any = self
        save = super().save_pretrained  # type: ignore[misc]
        state = kwargs.get("state_dict")
        if state is not None and MARKER not in state:
            return save(save_directory, *args, **kwargs)
        push = kwargs.pop("push_to_hub", False)
        model.config.quantization_config = _described(model)
        try:
            result = save(save_directory, *args, **kwargs)
        finally:
            del model.config.quantization_config
        if kwargs.get("is_main_process", True):
            _stop_others(Path(save_directory))
        if push:  # saves again, then uploads
            model.push_to_hub(kwargs.get("repo_id") or Path(save_directory).name)
        return result


def keep_transform(model: nn.Module, restore: Restore) -> None:
    """Makes a transformers model with unit-scaled weights save its transform, and
    ``from_pretrained`` restore it. Its submodules cannot be saved on their own."""
    for module in model.modules():
        if is_pretrained(module):
            add_mixin(module, Pretrained)
            register(restore)


def _described(model: Any) -> dict[str, Any]:
    """The quantization_config; without a plan if the model has functions in ``replace``. Raises
    ValueError for a submodule, which has no plan."""
    scope, path = scaling(model)
    if path:
        raise ValueError(
            f"{path} is a part of a unit-scaled model: save the model, or that part of "
            "unit_scaling.fold(model)"
        )
    plan = None if scope.replacements else scope.data(model).to_json()
    return {"quant_method": METHOD, "plan": plan}


def _stop_others(folder: Path) -> None:
    path = folder / "config.json"
    if path.exists():
        content = {**json.loads(path.read_text(encoding="utf-8")), "transformers_weights": _STOP}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def register(restore: Restore) -> None:
    """Makes ``from_pretrained`` restore models. Raises ImportError without transformers."""
    auto = _module("transformers.quantizers.auto")
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(_config_class())
        auto.register_quantizer(METHOD)(_quantizer_class(restore))


def _module(name: str) -> Any:
    need("transformers")
    return importlib.import_module(name)


def _config_class() -> type:
    mixin: Any = _module("transformers.utils.quantization_config").QuantizationConfigMixin

    class UnitScaleConfig(mixin):
        def __init__(self, plan: str | None, quant_method: str = METHOD) -> None:
            self.plan = plan
            self.quant_method = quant_method

    return UnitScaleConfig


def _quantizer_class(restore: Restore) -> type:
    base: Any = _module("transformers.quantizers.base").HfQuantizer

    class UnitScaleQuantizer(base):
        requires_calibration = False
        is_trainable = True

        def is_serializable(self) -> bool:
            return True

        def update_attn_implementation(self, config: Any) -> Any:
            """Reads the configuration before the weights file is looked up."""
            if self.quantization_config.plan is None:
                raise ValueError(
                    "the model was saved with functions in unit_scale(replace=...), which are not "
                    "saved: apply unit_scale again and load its state_dict"
                )
            vars(config).pop("transformers_weights", None)
            return config

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            known = model._keys_to_ignore_on_load_unexpected or ()
            model._keys_to_ignore_on_load_unexpected = {*known, *_KEYS}
            return model

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            model._keys_to_ignore_on_load_unexpected -= _KEYS
            plan = ModelPlan.from_json(self.quantization_config.plan)
            self.remove_quantization_config(model)
            for module in model.modules():
                vars(getattr(module, "config", self)).pop("_is_quantized", None)
            restore(model, plan)
            return model

    return UnitScaleQuantizer
