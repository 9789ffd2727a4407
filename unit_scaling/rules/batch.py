"""The batch of an optimizer step, where it is more than the rows that one call of the model sees.

The gradient of a weight sums over the rows of the batch, and its rule divides by the square root of
their number. With several processes, or gradients accumulated over several calls, the sum goes on
outside the model, where no rule sees it: `batch_multiplier` tells them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["batch_multiplier", "row_scale"]


_OPEN: list[tuple[int, int]] = []
"""The open blocks of the process, the one opened last at the end."""


class _Batch(threading.local):
    """(multiplier, averaged_over) of the open blocks of a thread, innermost last.

    Threads that Python has not started are those of autograd, one for each GPU, which compute
    checkpointed layers again: they see the block that was opened last in the process.
    """

    def __init__(self) -> None:
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        self.blocks: list[tuple[int, int]] = _OPEN if foreign else []


_BATCH = _Batch()


@contextmanager
def batch_multiplier(n: int, *, averaged_over: int = 1) -> Iterator[None]:
    """Within the block, an optimizer step sees n times the rows of each call: forward and backward.

    n: the number of processes times the number of accumulated calls, 1 or more. The gradient of
    a weight is then that of the one large batch, as are those of biases, norms and embeddings.
    averaged_over: by what the gradients are divided on their way to the optimizer although the
    loss has not been averaged: the number of processes, 1 or more.

    A loss of unit_scaling passes back the gradient of a *sum* over examples, for
    ``reduction="mean"`` too, so that gradients of calls, and of processes, are to be added:

    - accumulation over k calls, ``loss.backward()`` in each and no division by k: ``n=k``;
    - DDP or FSDP over w processes, which average: ``n=w, averaged_over=w``;
    - both: ``n=w * k, averaged_over=w``;
    - processes that add gradients (FSDP2: ``set_gradient_divide_factor(1)``): ``n=w``.

    With a loss of torch's that *is* a mean, averages are right: ``n=w * k``, no averaged_over, and
    a division of the loss by k.
    The block belongs to the thread that opens it.
    Raises ValueError for a number below 1 and TypeError for what is not a whole number.

    >>> with batch_multiplier(4):
    ...     row_scale(16)
    0.125
    """
    for name, value in (("n", n), ("averaged_over", averaged_over)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"batch_multiplier: {name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"batch_multiplier: {name} must be 1 or more, got {value}")
    blocks, block = _BATCH.blocks, (n, averaged_over)
    opened = [blocks] if blocks is _OPEN else [blocks, _OPEN]
    for each in opened:
        each.append(block)
    try:
        yield
    finally:
        for each in opened:
            each.reverse()
            each.remove(block)
            each.reverse()


def row_scale(rows: float, power: float = 0.5) -> float:
    """``rows ** -power``, rows of the whole batch: the factor of a gradient that sums over them.

    rows: those of this call; none counts as one, where no element is there to be scaled. Every
    rule of a gradient that sums over the batch calls this, for the gradients of parameters alone.
    """
    # No float() and no truth value: the number may be one that a compiled graph works out.
    seen = 1 if rows == 0 else rows
    blocks = _BATCH.blocks
    multiplier, averaged_over = blocks[-1] if blocks else (1, 1)
    scale: float = averaged_over * (seen * multiplier) ** -power
    return scale
