"""Undoes what a run of a model writes into its parameters.

A momentum encoder updates its parameters in its forward pass, through ``.data`` or under
`torch.no_grad`. A run that only looks at a model, or is made again, must not take such a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .step import tensors

__all__ = ["Writes", "restored"]


class Writes:
    """The values of some tensors before torch calls wrote into them.

    Only those that a call writes into are copied. Tensors without storage of their own, such as
    those of examples inside torch.vmap and sharded ones, are left alone.
    """

    def __init__(self, of: Iterable[Tensor]) -> None:
        self._of = of
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._data: list[tuple[Tensor, Tensor]] = []
        self._at: dict[int, Tensor] | None = None

    def note(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Keeps what a call is about to overwrite."""
        if function == _SET_DATA:
            self._data.append((args[0], args[0].detach()))
        elif _may_write(getattr(function, "__name__", ""), kwargs):
            if self._at is None:
                self._at = {key: t for t in self._of if (key := _storage(t)) is not None}
            for tensor in tensors([args, kwargs]):
                key = _storage(tensor)
                if key in self._at and key not in self._values:
                    known = self._at[key].detach()
                    self._values[key] = known, known.clone()

    def undo(self) -> None:
        """Writes back what was kept."""
        for tensor, before in reversed(self._data):
            tensor.data = before
        for tensor, before in self._values.values():
            tensor.data.copy_(before)


@contextmanager
def restored(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gives the parameters, on exit, the values that they have now."""
    writes = Writes(list(parameters))
    try:
        with _Noting(writes):
            yield
    finally:
        writes.undo()


class _Noting(TorchFunctionMode):
    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._writes.note(function, args, kwargs or {})
        return function(*args, **kwargs or {})


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_STATISTICS = ("batch_norm", "instance_norm")
"""Functions that write into their running mean and variance."""


def _may_write(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call of this name may write into its arguments."""
    operator = name.startswith("__i") or name == "__setitem__" or name in _STATISTICS
    marked = name.endswith("_") and not name.endswith("__")
    return operator or marked or "out" in kwargs or bool(kwargs.get("inplace"))


def _storage(tensor: Tensor) -> int | None:
    """The address of the values of a tensor; None where there is none."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None
