"""What is in force in a thread: one stack of frames.

A block that changes something for the calls inside of it (`fp8.autocast`, a measurement, a pass of
`fp8.stats`, a mode that records a model) opens a frame: the one around it with some fields changed.
Readers take the last frame of `FRAMES`, without a call: a product reads it each time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class Frame(NamedTuple):
    """What is in force.

    Attributes:
        block: the innermost `fp8.autocast` (a `fp8.products.active.Block`), if one is open.
        early_modes: the modes that see each call before any autocast, in the order of entry. An
            autocast inside of them puts them back on top.
        measurement: the `fp8.casts.measuring.Measurement` that measures operands, if one does.
            Meanwhile nothing is cast or compiled.
        recording: the `fp8.casts.counts.Recording` that counts what casts lose, if one does.
        kept: how many blocks of `fp8.common.step.kept` are open.
        observer: what sees the calls of a model, if anything does; False where nothing may.
        batch: the innermost `unit_scaling.rules.batch.batch_multiplier`, if one is open.
        opener: what opened the frame; None if torch.compile traced that.
        changes: the fields in which it differs from the frame around it.
    """

    block: Any = None
    early_modes: tuple[TorchFunctionMode, ...] = ()
    measurement: Any = None
    recording: Any = None
    kept: int = 0
    observer: Any = None
    batch: Any = None
    opener: object = None
    changes: Any = None


class Stack(threading.local):
    """A per-thread stack, innermost last. Copies and pickles are empty. A list in a thread-local,
    whose mutations torch.compile traces; it loses assignments there, and refuses context
    variables."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __reduce__(self) -> Any:
        return Stack, ()


class _Frames(threading.local):
    """A per-thread stack of frames. The first frame of a thread belongs to no block."""

    def __init__(self) -> None:
        self.items: list[Frame] = [Frame()]


FRAMES = _Frames()

IN_PIECES = (
    "the function that contains fp8.autocast could not be compiled in one piece (a graph break): "
    "compile it with fullgraph=True to see where"
)


def open_frame(opener: object, **changes: Any) -> None:
    """Opens a frame with these fields."""
    if torch.compiler.is_dynamo_compiling():
        opener = None
    frame = FRAMES.items[-1]
    FRAMES.items.append(frame._replace(opener=opener, changes=changes, **changes))


def close_frame(opener: object) -> tuple[Frame, list[Frame]]:
    """Closes the last frame that ``opener`` opened in this thread.

    Blocks of generators and passes of `fp8.stats` may end before those that were opened inside of
    them: frames inside of it stay open, without its changes. Returns the frame, and those inside.
    Raises RuntimeError if there is none.
    """
    frames = FRAMES.items
    if torch.compiler.is_dynamo_compiling():
        return frames.pop(), []
    for index in range(len(frames) - 1, 0, -1):
        # None: a graph opened it, and a graph break has left its end to eager code.
        if frames[index].opener is opener or frames[index].opener is None:
            closed, *inside = frames[index:]
            del frames[index:]
            for frame in inside:
                open_frame(frame.opener, **frame.changes)
            return closed, inside
    raise RuntimeError(
        f"{type(opener).__name__}: a block is closed in the thread that has opened it"
    )


@contextmanager
def framed(**changes: Any) -> Iterator[None]:
    """Within the block, a frame with these fields is open."""
    opener = object()
    open_frame(opener, **changes)
    try:
        yield
    finally:
        close_frame(opener)
