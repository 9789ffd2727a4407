"""What the state_dict of a unit-scaled model has besides weights: a marker, and the plan.

The weights of ``unit_scale(init="unit")`` have the names and shapes of the plain class, but compute
something else in it. Their state_dict has an additional key that strict loading into the plain
class rejects; its name says what to do. Conversely, a unit-scaled model misses the key in a plain
checkpoint. It is neither parameter nor buffer, so averages and optimizers do not see it.

The plan makes a resumed process compute the same bit for bit, and the optimizer's state match the
gradients. It is stored as extra state (`nn.Module.get_extra_state`), which is saved by torch.save,
safetensors and torch.distributed.checkpoint, and broadcast by the latter from the first process.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fp8.common.mixin import Gained
from fp8.common.pitfalls import CheckpointWarning, warn_once

MARKER = "unit_scaled_load_into_unit_scale_or_save_uu_fold"
"""The last part of the key, after the name of the transformed module."""

VERSION = torch.tensor(1)
"""The value of the key: a tensor of fixed size, which all checkpoint formats support."""


_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "module.")


def mark(destination: dict[str, Any], prefix: str) -> None:
    """Adds the key to a state_dict."""
    destination[prefix + MARKER] = VERSION.clone()


def unmarked(state: Mapping[str, Any], prefix: str, weights: Collection[str]) -> bool:
    """Whether a state_dict has weights of the model and no marker.

    weights: the names of weights divided by a factor. False except on the first process of a group:
    others may receive only the weights, later.
    """
    grouped = distributed.is_available() and distributed.is_initialized()
    if prefix + MARKER in state or (grouped and distributed.get_rank() > 0):
        return False
    return any(prefix + name in state for name in weights)


def accepted(prefix: str, unexpected: list[str]) -> bool:
    """Whether the key is among the unexpected keys; removes it from them.

    torch.distributed.checkpoint strips wrapper names from all keys, and restores them only for
    parameters and buffers.
    """
    inner = prefix
    for wrapper in _WRAPPERS:
        inner = inner.replace(wrapper, "")
    found = [key for key in (prefix + MARKER, inner + MARKER) if key in unexpected]
    for key in dict.fromkeys(found):
        unexpected.remove(key)
    return bool(found)


def message(model: nn.Module) -> str:
    """The error message for a plain checkpoint."""
    return (
        f"{type(model).__name__} is unit-scaled and these are the weights of the plain model: the "
        f"key {MARKER!r} is missing. Load a plain checkpoint before unit_scale(model), or use "
        "unit_scale(model, init='preserve')"
    )


def warn_of(model: nn.Module) -> None:
    """Warns of a plain checkpoint."""
    warn_once(CheckpointWarning, message(model), model, "plain weights")


EXTRA_STATE = "_extra_state"
"""The last part of the key of an extra state in torch."""

_PAGE = 2**18
"""The state is padded to a multiple of this many bytes: torch.distributed.checkpoint loads tensors
only into tensors of the same size. Most plans are smaller.
"""


class PlanState(Gained):
    """A model whose weights are scaled; its extra state holds its plan."""

    _scopes: tuple[tuple[Any, str], ...]

    def get_extra_state(self) -> Any:
        """Returns the plan as compressed JSON in a uint8 tensor, with the original class's extra
        state if any.
        """
        plan = _packed(_scope(self).held(self))
        own = _own_class(self)
        return plan if own is None else {"module": own.get_extra_state(self), "unit_scale": plan}

    def set_extra_state(self, state: Any) -> None:
        """Adopts the plan of a checkpoint, if it has one for the same model."""
        own = _own_class(self)
        if own is not None and isinstance(state, dict) and "unit_scale" in state:
            own.set_extra_state(self, state["module"])
            state = state["unit_scale"]
        plan = _unpacked(state) if isinstance(state, Tensor) else ""
        if plan:
            _scope(self).take_over(self, plan)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        load = super()._load_from_state_dict  # type: ignore[misc]
        load(state_dict, prefix, metadata, strict, missing, *rest)
        if prefix + EXTRA_STATE in missing:  # the marker tells whether weights are scaled
            missing.remove(prefix + EXTRA_STATE)


def _scope(module: PlanState) -> Any:
    return next(scope for scope, _ in module._scopes if getattr(scope, "unit_scaled", False))


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
