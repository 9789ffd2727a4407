"""State of the running thread and of the process, and the calls of torch that are running in this
thread, by their frames."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

GRAPH_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Qualified name -> a function that compiled graphs call by name: see `compiler.in_graph`. A graph
can hold a string where it cannot hold a class."""


class Stack(threading.local):
    """A per-thread stack, innermost last. Copies and pickles are empty. A list in a thread-local,
    whose mutations torch.compile traces; it loses assignments there, and refuses context
    variables."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __reduce__(self) -> Any:
        return Stack, ()


@contextmanager
def pushed(items: list[Any], item: Any) -> Iterator[None]:
    """Within the block, an item is the last of a list."""
    items.append(item)
    try:
        yield
    finally:
        items.pop()


class Setting(ContextDecorator):
    """A process-wide setting, changed while at least one thread holds it. change: changes it and
    returns a context manager whose exit restores it."""

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._holders = 0
        self._held_here = Stack()
        self._changed: AbstractContextManager[Any] = nullcontext()

    @property
    def is_held(self) -> bool:
        """Whether this thread holds it."""
        return bool(self._held_here.items)

    def hold(self) -> None:
        with self._lock:
            if not self._holders:
                self._changed = self._change()
            self._holders += 1
        self._held_here.items.append(None)

    def release(self, *error: Any) -> None:
        self._held_here.items.pop()
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._changed.__exit__(None, None, None)

    __enter__, __exit__ = hold, release


# Frames

_OWN = str(Path(__file__).parents[1])
_PIPELINING = "torch.distributed.pipelining"


def frames() -> Iterator[FrameType]:
    """The frames of the active calls, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


_CHECKPOINT = CheckpointFunction.forward.__code__.co_filename


def _running(file: str | None = _CHECKPOINT) -> list[str]:
    """The names of the running functions of a file; none if torch.compile traces the call."""
    if torch.compiler.is_dynamo_compiling():
        return []
    return [f.f_code.co_name for f in frames() if f.f_code.co_filename == file]


def refuse_split_graphs() -> None:
    """Raises RuntimeError while `torch.distributed.pipelining.pipeline` exports a model: an
    exported program has no backward pass of autograd functions."""
    library = sys.modules.get(_PIPELINING)
    if library is not None and "pipeline" in _running(library.pipeline.__code__.co_filename):
        raise RuntimeError(
            "torch.distributed.pipelining.pipeline splits the graph of torch.export, which leaves "
            "out the backward passes of casts and scale factors, so its stages would not train. "
            "Make the stages of modules: PipelineStage(part, ...) for each part of the model"
        )


def in_shape_inference() -> bool:
    """Whether `torch.distributed.pipelining` infers shapes: it runs each stage on uninitialized
    tensors before its first step."""
    if torch.compiler.is_dynamo_compiling():
        return False
    stage = sys.modules.get(f"{_PIPELINING}.stage")
    if stage is None:
        return False
    names = _running(stage.__file__)
    return bool(names) and not any(name.endswith("one_chunk") for name in names)


def in_reentrant() -> bool:
    """Whether the forward pass, without gradients, of a reentrant checkpoint is running."""
    return not torch.is_grad_enabled() and "forward" in _running()


def in_recomputation() -> bool:
    """Whether a checkpoint with ``use_reentrant=False`` is recomputing in the backward pass."""
    return "recompute_fn" in _running()


def recomputes() -> bool:
    """Whether a checkpoint is recomputing, or runs the backward pass of what it recomputed."""
    return not {"recompute_fn", "backward"}.isdisjoint(_running())


def checkpoints() -> int:
    """The number of checkpoints whose forward pass or recomputation is running."""
    calls = ("checkpoint", "recompute_fn", "backward")
    return sum(name in calls for name in _running())


def apart() -> AbstractContextManager[Any]:
    """Context in which a running checkpoint neither sees nor counts saved tensors."""
    if any(name in ("checkpoint", "recompute_fn") for name in _running()):
        return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    return nullcontext()


def is_from_graph() -> bool:
    """Whether code that Inductor has generated makes the running call of torch."""
    if torch.compiler.is_dynamo_compiling():
        return False
    caller = next(f for f in frames() if not f.f_code.co_filename.startswith(_OWN))
    return "extern_kernels" in caller.f_globals


def function_around() -> str:
    """The autograd function that makes the running call, perhaps through others; "" if none."""
    return next(filter(None, map(function_of, frames())), "")


def function_of(frame: FrameType) -> str:
    """The autograd function whose ``forward`` runs in ``frame``; "" for none. From torch 2.14 on,
    ``apply`` has no frame."""
    code = frame.f_code
    name = _name_of(code)
    if not name:
        return ""
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(first, BackwardCFunction):  # ctx, of a class that may have inherited forward
        name = type(first).__name__.removesuffix("Backward")
    return f"the autograd function {name}"


@cache
def _name_of(code: CodeType) -> str:
    """The name of the autograd function whose ``forward`` has this code; "" if none has."""
    classes: list[type] = [Function]
    while classes:
        kind = classes.pop()
        forward = getattr(vars(kind).get("forward"), "__func__", None)
        if forward is not None and getattr(inspect.unwrap(forward), "__code__", None) is code:
            return kind.__name__
        classes += kind.__subclasses__()
    return ""
