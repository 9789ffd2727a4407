"""The plan of a unit-scaled model in its state_dict.

With it a process that resumes computes what the first one did, to the bit, and the state of an
optimizer fits the gradients. It is the module's extra state (`nn.Module.get_extra_state`), which
torch.save, safetensors, torch.distributed.checkpoint and its broadcast from the first process all
carry.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.mixin import Gained

__all__ = ["EXTRA_STATE", "PlanState"]

EXTRA_STATE = "_extra_state"
"""The last part of the key of an extra state, as torch calls it."""

_PAGE = 2**16
"""The state has a multiple of this many bytes: torch.distributed.checkpoint loads a tensor into one
of the same size, and the plans of most models take less."""


class PlanState(Gained):
    """What a model whose weights are scaled has besides: its plan, in its extra state."""

    _scopes: tuple[tuple[Any, str], ...]

    def get_extra_state(self) -> Any:
        """The plan as JSON, compressed, as a tensor of bytes; beside it the extra state that the
        class of the module has itself."""
        plan = _packed(_scope(self).held(self))
        own = _own_class(self)
        return plan if own is None else {"module": own.get_extra_state(self), "unit_scale": plan}

    def set_extra_state(self, state: Any) -> None:
        """Takes over the plan of a checkpoint that has one and is of the same model."""
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
        if prefix + EXTRA_STATE in missing:  # whether the weights are scaled, the marker says
            missing.remove(prefix + EXTRA_STATE)


def _scope(module: PlanState) -> Any:
    return next(scope for scope, _ in module._scopes if getattr(scope, "unit_scaled", False))


def _own_class(module: PlanState) -> Any:
    """The class of the module before the transform, if it has an extra state."""
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
