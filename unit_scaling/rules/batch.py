"""The batch size of an optimizer step, where it exceeds the rows of one call of the model.

A weight gradient sums over the rows of the batch, and its rule divides by the root of their number.
With several processes or accumulated gradients the sum continues outside the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fp8.common.validation import check_whole
from fp8.frame import FRAMES, framed


@dataclass(eq=False)  # two equal blocks are not the same
class _Block:
    n: int
    averaged_over: int


_OPEN: list[_Block] = []
"""The open blocks of the process, for threads without a block of their own: the threads of
autograd, which recompute checkpointed layers, and threads that a model starts."""


@contextmanager
def batch_multiplier(n: int, *, averaged_over: int = 1) -> Iterator[None]:
    """Declares that an optimizer step sees n times the rows of each call inside the block: the
    gradients of parameters are then scaled for the whole batch.

    The block applies to forward and backward passes, in its thread and in those without a block of
    their own. A loss of unit_scaling propagates the gradient of a *sum* over examples, for
    ``reduction="mean"`` too: the gradients of accumulated calls are added, without division of the
    loss.

    Args:
        n: the number of processes times the number of accumulated calls.
        averaged_over: the number that gradients are divided by on their way to the optimizer
            although the loss is a sum: the number of processes under DDP and FSDP, which average, 1
            if gradients are summed or the loss is a mean.

    >>> with batch_multiplier(4):
    ...     row_scale(16)
    0.125
    """
    check_whole("batch_multiplier: n", n)
    check_whole("batch_multiplier: averaged_over", averaged_over)
    block = _Block(n, averaged_over)
    _OPEN.append(block)
    try:
        with framed(batch=block):
            yield
    finally:
        _OPEN.remove(block)


def row_scale(rows: float, power: float = 0.5) -> float:
    """The factor of a parameter's gradient that sums over the batch: ``rows ** -power``, with the
    rows of the whole batch. rows: the rows of this call; 0 counts as 1."""
    # No float() and no truth value: under torch.compile, rows may be symbolic.
    seen = 1 if rows == 0 else rows
    n, averaged_over = 1, 1
    if _OPEN:  # without a block a graph guards nothing else
        block = FRAMES.items[-1].batch or _OPEN[-1]
        n = block.n
        averaged_over = block.averaged_over
    scale: float = averaged_over * (seen * n) ** -power
    return scale
