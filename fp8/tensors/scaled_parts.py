"""Base class of tensor subclasses that consist of two tensors and have no storage of their own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["Parts", "refuse_rounding", "warn_of_small_steps"]

aten = torch.ops.aten

_STEPS = (aten.addcdiv_, aten._foreach_addcdiv_, aten._fused_adam_, aten._fused_adamw_)
_AVERAGES = (aten.lerp_, aten._foreach_lerp_)
_SUMS = (aten.add_, aten._foreach_add_)
"""The in-place operations that torch's optimizers use to update a weight, and weight averages to
follow it; sums with a factor count too."""


class Parts(Tensor):
    """A tensor with the values ``stored * scale``."""

    stored: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype`` (default: its own). Not differentiable."""
        numbers = self.stored.detach().to(torch.float32) * self.scale
        return numbers.to(self.dtype if dtype is None else dtype)

    def _write(self, numbers: Tensor) -> Any:
        raise NotImplementedError

    @property
    def data(self) -> Any:
        """As for any tensor, an alias without gradient. Assigning it stores the new values; shape
        and dtype are then those of the assigned tensor."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        numbers = new.detach().to(torch.float32)
        self._check("setting .data", numbers)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        if (self.stored.shape, self.stored.device) != (new.shape, new.device):
            self.stored = self.stored.new_empty(new.shape, device=new.device)
            self.scale = self.scale.to(new.device)
        with torch.no_grad():
            self._write(numbers)

    def _check(self, name: str, numbers: Tensor) -> None:
        raise NotImplementedError

    def share_memory_(self) -> Any:
        """Moves both tensors to shared memory."""
        self.stored.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.stored.is_shared()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the values as an array."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        return self.dequantize().tolist()


def warn_of_small_steps(func: Any, kwargs: dict[str, Any]) -> None:
    """Warns with a UserWarning, on each call, if the in-place operation ``func`` on ScaledTensors
    is one whose changes may be rounded away, so that the values would not change."""
    kind = func.overloadpacket
    step = kind in (*_STEPS, *_AVERAGES) or func.namespace == "bitsandbytes"
    if step or (kind in _SUMS and kwargs.get("alpha", 1) != 1):
        warnings.warn(
            f"{kind.__name__} on a ScaledTensor: its format rounds small steps away. Step it by an "
            "optimizer that fp8.initialize returned; make a copy that averages weights before "
            "fp8.initialize",
            stacklevel=4,
        )


def refuse_rounding(name: str, rounded: Tensor, numbers: Tensor) -> None:
    """Raises NotImplementedError unless ``rounded``, in a format, equals ``numbers``, the result of
    the operation ``name``. NaN is equal to NaN."""
    if not torch.allclose(rounded, numbers, rtol=0, atol=0, equal_nan=True):
        raise NotImplementedError(
            f"{name} would round a weight that fp8.store_frozen keeps in few bits (merging an "
            "adapter, or a step of an optimizer): call fp8.store_frozen(model, None) first, which "
            "makes the weights plain parameters again"
        )
