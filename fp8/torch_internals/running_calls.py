"""Which calls of torch are running in this thread, by their frames on the stack of Python.

Works around: torch (2.11 to 2.14) does not say whether a checkpoint runs its function or computes
it again, whether a call comes from generated code, and which compiler a traced graph is for. The
names of functions and files of torch do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

_OWN = str(Path(__file__).parents[1])
_INDUCTOR = str(Path(torch.__file__).with_name("_inductor"))


def python_frames() -> Iterator[FrameType]:
    """The frames of the active calls, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


_CHECKPOINT = CheckpointFunction.forward.__code__.co_filename


def running(file: str | None = _CHECKPOINT) -> list[str]:
    """The names of the running functions of a file; none if torch.compile traces the call."""
    if torch.compiler.is_dynamo_compiling():
        return []
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # not by `python_frames`: each of its items is a call
        if frame.f_code.co_filename == file:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def in_reentrant() -> bool:
    """Whether the forward pass, without gradients, of a reentrant checkpoint is running."""
    return not torch.is_grad_enabled() and "forward" in running()


def in_recomputation() -> bool:
    """Whether a checkpoint with ``use_reentrant=False`` is recomputing in the backward pass."""
    return "recompute_fn" in running()


def recomputes() -> bool:
    """Whether a checkpoint is recomputing, or runs the backward pass of what it recomputed."""
    return not {"recompute_fn", "backward"}.isdisjoint(running())


def checkpoints() -> int:
    """The number of checkpoints whose forward pass or recomputation is running."""
    calls = ("checkpoint", "recompute_fn", "backward")
    return sum(name in calls for name in running())


def apart() -> AbstractContextManager[object]:
    """Context in which a running checkpoint neither sees nor counts saved tensors."""
    if any(name in ("checkpoint", "recompute_fn") for name in running()):
        return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    return nullcontext()


def is_from_graph() -> bool:
    """Whether code that Inductor has generated makes the running call of torch."""
    if torch.compiler.is_dynamo_compiling():
        return False
    caller = next(
        f for f in python_frames() if not f.f_code.co_filename.startswith(_OWN)
    )
    return "extern_kernels" in caller.f_globals


def is_inductors() -> bool:
    """Whether the graph that calls this, from an `in_graph` function, becomes kernels of inductor:
    not one that is exported, nor one that torch.compile makes for "eager" or "aot_eager", which
    run the functions of torch. False before torch 2.13, where running code may count as compiled.
    """
    old = torch.__version__ < "2.13"
    if old or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    files = [frame.f_code.co_filename for frame in python_frames()]
    by_dynamo = any(file.endswith("convert_frame.py") for file in files)
    return not by_dynamo or any(file.startswith(_INDUCTOR) for file in files)
