"""The batch size of an optimizer step, where it exceeds the rows of one call of the model.

A weight gradient sums over the rows of the batch, and its rule divides by the root of their number.
With several processes or accumulated gradients the sum continues outside the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fp8.common.validation import check_whole

_OPEN: list[tuple[int, int]] = []
"""The open blocks of the process, most recent last."""


class _Batch(threading.local):
    """(multiplier, averaged_over) of the open blocks of a thread, innermost last. Threads not
    started by Python, those of autograd that recompute checkpointed layers, use the one opened
    last."""

    def __init__(self) -> None:
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        self.blocks: list[tuple[int, int]] = _OPEN if foreign else []


_BATCH = _Batch()


@contextmanager
def batch_multiplier(n: int, *, averaged_over: int = 1) -> Iterator[None]:
    """Declares that an optimizer step sees n times the rows of each call inside the block: the
    gradients of parameters are then those of the whole batch.

    The block applies to forward and backward passes, in the thread that opens it. A loss of
    unit_scaling propagates the gradient of a *sum* over examples, for ``reduction="mean"`` too, so
    gradients of several calls or processes must be added:

    - accumulation over k calls, ``loss.backward()`` in each without division by k: ``n=k``;
    - DDP or FSDP over w processes, which average: ``n=w, averaged_over=w``;
    - both: ``n=w * k, averaged_over=w``;
    - processes that sum gradients (FSDP2: ``set_gradient_divide_factor(1)``): ``n=w``.

    With a torch loss that *is* a mean, averages are correct: ``n=w * k`` without averaged_over, and
    the loss divided by k.

    Args:
        n: the number of processes times the number of accumulated calls.
        averaged_over: the number that gradients are divided by on their way to the optimizer
            although the loss is a sum.

    >>> with batch_multiplier(4):
    ...     row_scale(16)
    0.125
    """
    check_whole("batch_multiplier: n", n)
    check_whole("batch_multiplier: averaged_over", averaged_over)
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
    """The factor of a parameter's gradient that sums over the batch: ``rows ** -power``, with the
    rows of the whole batch. rows: of this call; 0 counts as 1."""
    # No float() and no truth value: under torch.compile, rows may be symbolic.
    seen = 1 if rows == 0 else rows
    blocks = _BATCH.blocks
    multiplier, averaged_over = blocks[-1] if blocks else (1, 1)
    scale: float = averaged_over * (seen * multiplier) ** -power
    return scale
