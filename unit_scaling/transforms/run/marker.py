"""The key that marks a checkpoint as one of a unit-scaled model.

The weights of ``unit_scale(init="unit")`` have the names and shapes of the plain class, but compute
something else in it. Their state_dict has an additional key that strict loading into the plain
class rejects; its name says what to do. Conversely, a unit-scaled model misses the key in a plain
checkpoint. It is neither parameter nor buffer, so averages and optimizers do not see it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import distributed, nn

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
