"""Models of the library transformers: their files say that they are unit-scaled, and how.

The configuration in the files has a ``quantization_config`` with ``quant_method`` "unit_scale" and
the plan. ``from_pretrained`` puts the transform back where the method is registered. Where it is
not, transformers would skip it with a warning and load the weights into the plain model. It is
stopped by the name of the file with the weights, which is none and says what to do.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fp8.common.libraries import need
from fp8.common.mixin import Gained, gain

from ..plan.model_plan import ModelPlan
from .marker import MARKER
from .plan_state import EXTRA_STATE

__all__ = ["METHOD", "Pretrained", "Restore", "keep_transform", "register"]

Restore = Callable[[nn.Module, ModelPlan], None]
"""Gives a model whose weights are those of a unit-scaled one the transform of a plan, in place."""

METHOD = "unit_scale"
"""The ``quant_method``."""

_KEYS = {MARKER, EXTRA_STATE}
"""The keys of a state_dict that are no weights."""

_STOP = (
    "none, as these weights are those of a unit-scaled model. Call "
    "unit_scaling.register_transformers() before from_pretrained, or save unit_scaling.fold(model)"
)
"""In place of the name of a file, which transformers shows in its error."""


class Pretrained(Gained):
    """A model that writes its transform into its files."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """As that of transformers. The configuration has the plan, unless other weights than those
        of this model are given in ``state_dict``.
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
        if push:  # which saves the model once more, and then sends the files
            model.push_to_hub(kwargs.get("repo_id") or Path(save_directory).name)
        return result


def keep_transform(model: nn.Module, restore: Restore) -> None:
    """Has a model of transformers, with weights at unit scale, write its transform into its files,
    and ``from_pretrained`` read it. Its parts then refuse to be saved by themselves.
    """
    if "transformers" not in sys.modules:
        return
    kind = need("transformers").PreTrainedModel
    for module in model.modules():
        if isinstance(module, kind):
            gain(module, Pretrained)
            register(restore)


def _described(model: Any) -> dict[str, Any]:
    """The quantization_config; without a plan for a model with functions in replace.

    Raises ValueError for a part of a model, which has no plan.
    """
    scopes = ((s, path) for s, path in model._scopes if getattr(s, "unit_scaled", False))
    ((scope, path),) = scopes
    if path:
        raise ValueError(
            f"{path} is a part of a unit-scaled model: save the model, or that part of "
            "unit_scaling.fold(model)"
        )
    plan = None if scope.replacements else scope.plan(model, seen=False).to_json()
    return {"quant_method": METHOD, "plan": plan}


def _stop_others(folder: Path) -> None:
    path = folder / "config.json"
    if path.exists():
        content = {**json.loads(path.read_text(encoding="utf-8")), "transformers_weights": _STOP}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def register(restore: Restore) -> None:
    """Has ``from_pretrained`` restore models. Raises ImportError without transformers."""
    auto = _module("transformers.quantizers.auto")
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        config, quantizer = _classes(restore)
        auto.register_quantization_config(METHOD)(config)
        auto.register_quantizer(METHOD)(quantizer)


def _module(name: str) -> Any:
    need("transformers")
    return importlib.import_module(name)


def _classes(restore: Restore) -> tuple[type, type]:
    """(what a quantization_config is read into, what acts on the model)."""
    mixin: Any = _module("transformers.utils.quantization_config").QuantizationConfigMixin
    base: Any = _module("transformers.quantizers.base").HfQuantizer

    class UnitScaleConfig(mixin):
        def __init__(self, plan: str | None, quant_method: str = METHOD) -> None:
            self.plan = plan
            self.quant_method = quant_method

    class UnitScaleQuantizer(base):
        requires_calibration = False
        is_trainable = True

        def is_serializable(self) -> bool:
            return True

        def update_attn_implementation(self, config: Any) -> Any:
            """Sees the configuration before the file with the weights is looked for."""
            if self.quantization_config.plan is None:
                raise ValueError(
                    "the model was saved with functions in unit_scale(replace=...), which are no "
                    "data: make it by unit_scale again and load its state_dict"
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

    return UnitScaleConfig, UnitScaleQuantizer
