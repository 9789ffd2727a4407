"""The RMS of operands, measured in a pass without casts: what `fp8.calibrate` reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..common.threads import Stack
from ..recipes.scaling import second_moment
from ..tensors.scaled_tensor import plain

__all__ = ["MEASURING", "Measurement", "measuring", "uncast"]


class Measurement:
    """Sums of squares and numbers of elements of all operands that a pass has met.

    moments: address of the state of an operand (its static scale) -> [state, sum, elements].
    histories: id -> the `fp8.AmaxHistory` that have these states.
    """

    def __init__(self) -> None:
        self.moments: dict[int, list[Any]] = {}
        self.histories: dict[int, Any] = {}

    def operand(self, state: Tensor | None, x: Tensor) -> None:
        """Adds ``x``, an operand whose state is ``state``; None: it has none."""
        if state is None or state.dim() > 1 or state.numel() != 1:
            return
        entry = self.moments.setdefault(state.data_ptr(), [state, 0.0, 0])
        entry[1] = entry[1] + second_moment(plain(x))
        entry[2] += x.numel()

    def gradient(self, state: Tensor | None, y: Tensor) -> Tensor:
        """``y``, whose gradient is added when it is known."""
        if state is not None and y.requires_grad:
            y.register_hook(lambda grad: self.operand(state, grad))
        return y


MEASURING = Stack()


@contextmanager
def uncast() -> Iterator[Measurement]:
    """Within the block products of this thread are measured and not cast."""
    MEASURING.items.append(Measurement())
    try:
        yield MEASURING.items[-1]
    finally:
        MEASURING.items.pop()


def measuring() -> Measurement | None:
    """What measures the operands in this thread now; products are not cast then. None: nothing."""
    if torch.compiler.is_compiling() or not MEASURING.items:
        return None
    return MEASURING.items[-1]
