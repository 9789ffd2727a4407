"""What the state_dict of a unit-scaled model has besides weights: a marker, and the plan.

The weights of ``unit_scale(model)`` compute something else in the plain class. A key of their
state_dict, whose name says what to do, makes strict loading fail there, as its absence does here.
``from_pretrained`` of transformers would skip it, so the configuration that `Pretrained` saves has
an invalid name of the weights file. With the plan, extra state of torch, a resumed process computes
the same bit for bit.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fp8.common.mixin import Mixin
from fp8.warnings import CheckpointWarning, warn_once

from ..parameter import TaggedModule, restore_own_tags

MARKER = "unit_scaled_load_into_unit_scale"
"""The last part of the key, after the name of the transformed module."""

VERSION = torch.tensor(1)
"""The value of the key: a tensor of fixed size, which all checkpoint formats support."""

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "module.")


def scaling(module: Any) -> tuple[Any, str]:
    """The scope that has scaled the weights of a transformed module, and the module's name in it;
    (None, "") if none has."""
    scopes = (item for item in module._scopes if getattr(item[0], "unit_scaled", False))
    return next(scopes, (None, ""))


class Marked(TaggedModule):
    """A module of a transformed model."""

    _scopes: tuple[tuple[Any, str], ...] = ()

    def _own_weights(self, prefix: str) -> list[str]:
        """The names of the weights that a scope has scaled, if the module is its model or the
        state_dict is that of a submodule alone, which has submodules: peft looks for the names of
        a layer (`modules_to_save`) in the state_dict of the model. Otherwise none."""
        scope, path = scaling(self)
        if scope is None or (path and (prefix or not self._modules)):
            return []
        restore_own_tags(self)
        types = ("weight", "output")
        return [n for n, p in self.named_parameters() if getattr(p, "mup_type", "") in types]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._own_weights(prefix):  # the first missing key explains the error
            destination[prefix + MARKER] = VERSION.clone()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        unexpected, weights = rest[0], self._own_weights(prefix)
        marked = bool(weights) and _accepted(prefix, unexpected)
        if not marked and _is_plain(state_dict, prefix, weights):  # whether strict or not
            missing.append(prefix + MARKER)
            warn_once(CheckpointWarning, _PLAIN.format(type(self).__name__), self, "plain weights")

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in torch. If ``strict``, weights of the plain model are refused before any is
        loaded."""
        if strict and _is_plain(state_dict, "", self._own_weights("")):
            raise RuntimeError(_PLAIN.format(type(self).__name__))
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


setattr(Marked, MARKER, VERSION)  # the key is looked up as an attribute

_PLAIN = (
    f"{{}} is unit-scaled and these are the weights of the plain model: the key {MARKER!r} is "
    "missing. Load a plain checkpoint before unit_scale(model); for trained weights use "
    "fp8.convert(model, 'static'), which keeps the function"
)


def _is_plain(state: Mapping[str, Any], prefix: str, weights: Collection[str]) -> bool:
    """Whether a state_dict has some of these scaled weights and no marker. False but on the first
    process of a group: others may receive only the weights, later."""
    grouped = distributed.is_available() and distributed.is_initialized()
    if prefix + MARKER in state or (grouped and distributed.get_rank() > 0):
        return False
    return any(prefix + name in state for name in weights)


def _accepted(prefix: str, unexpected: list[str]) -> bool:
    """Removes the marker from the unexpected keys; whether it was there. DCP strips the names of
    wrappers from all keys, and restores them for parameters and buffers alone."""
    inner = prefix
    for wrapper in _WRAPPERS:
        inner = inner.replace(wrapper, "")
    keys = {prefix + MARKER, inner + MARKER}.intersection(unexpected)
    for key in keys:
        unexpected.remove(key)
    return bool(keys)


EXTRA_STATE = "_extra_state"
"""The last part of the key of an extra state in torch."""

_PAGE = 2**18
"""The state has a multiple of this many bytes, more than most plans: torch.distributed.checkpoint
loads a tensor only into one of its size."""


class PlanState(Mixin):
    """A model whose weights are scaled; its extra state holds its plan."""

    def get_extra_state(self) -> Any:
        """The plan as compressed JSON in a uint8 tensor, with the class's extra state if any."""
        own, scope = _own_class(self), scaling(self)[0]
        plan = _packed("" if scope.replacements else scope.data(self).to_json())
        return plan if own is None else {"module": own.get_extra_state(self), "unit_scale": plan}

    def set_extra_state(self, state: Any) -> None:
        """Adopts the plan of a checkpoint, if it has one for the same model."""
        own = _own_class(self)
        if own is not None and isinstance(state, dict) and "unit_scale" in state:
            own.set_extra_state(self, state["module"])
            state = state["unit_scale"]
        plan = _unpacked(state) if isinstance(state, Tensor) else ""
        if plan:
            scaling(self)[0].adopt_saved(self, plan)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        load = super()._load_from_state_dict  # type: ignore[misc]
        load(state_dict, prefix, metadata, strict, missing, *rest)
        if prefix + EXTRA_STATE in missing:  # the marker tells whether weights are scaled
            missing.remove(prefix + EXTRA_STATE)


def _own_class(module: PlanState) -> Any:
    """The original class of the module, if it has an extra state."""
    own = module._original
    return None if own.get_extra_state is nn.Module.get_extra_state else own


def _packed(plan: str) -> Tensor:
    data = zlib.compress(plan.encode())
    data = len(data).to_bytes(8, "little") + data
    data += bytes(-len(data) % _PAGE)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(state: Tensor) -> str:
    data = bytes(state.cpu().tolist())
    size = int.from_bytes(data[:8], "little")
    return zlib.decompress(data[8 : 8 + size]).decode()


_STOP = (
    "none, as these weights are those of a unit-scaled model. Load them by load_state_dict into "
    "unit_scale(model). The model of unit_scale(model, batch=...) is a plain one"
)
"""Replaces the file name that transformers shows in its error."""


class Pretrained(Mixin):
    """A model of transformers whose weights are scaled."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers. ``from_pretrained`` refuses the files, unless ``state_dict`` has the
        weights of another model. Raises ValueError for ``push_to_hub``."""
        state = kwargs.get("state_dict")
        ours = state is None or MARKER in state
        if ours and kwargs.get("push_to_hub"):
            raise ValueError(
                "push_to_hub: the weights of unit_scale(model) compute something else in the plain "
                "class. Train unit_scale(model, batch=...), which is a plain model"
            )
        result = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        path = Path(save_directory) / "config.json"
        if ours and kwargs.get("is_main_process", True) and path.exists():
            content = json.loads(path.read_text(encoding="utf-8")) | {"transformers_weights": _STOP}
            path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return result
