"""The plan of a unit-scaled model in its state_dict.

It makes a resumed process compute the same bit for bit, and the optimizer's state match the
gradients. It is stored as extra state (`nn.Module.get_extra_state`), which is saved by torch.save,
safetensors and torch.distributed.checkpoint, and broadcast by the latter from the first process.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.mixin import Gained

__all__ = ["EXTRA_STATE", "PlanState"]

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
