"""Activation checkpointing and modes: what is recomputed has to run under the mode again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint

__all__ = ["checkpointed", "in_recomputation", "in_reentrant"]


def checkpointed(
    mode: TorchFunctionMode, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``checkpoint(function, *args, **kwargs)`` with the mode on inside of it.

    For a mode that is asked about ``torch.utils.checkpoint.checkpoint``. Only the compiler does
    so, and takes what the mode then calls to be outside of the mode.
    """

    def within(*args: Any, **kwargs: Any) -> Any:
        TorchFunctionMode.__enter__(mode)
        try:
            return function(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(mode, None, None, None)

    return checkpoint(within, *args, **kwargs)


def in_reentrant() -> bool:
    """Whether this is the forward pass of a checkpoint with ``use_reentrant=True``.

    That kind runs without gradients inside an autograd function, and tells nobody.
    """
    if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return False
    code = CheckpointFunction.forward.__code__
    return any(frame.f_code is code for frame in _frames())


def in_recomputation() -> bool:
    """Whether this is what a checkpoint without reentry computes again in the backward pass."""
    if torch.compiler.is_dynamo_compiling():
        return False
    here = ("recompute_fn", CheckpointFunction.forward.__code__.co_filename)
    return any((frame.f_code.co_name, frame.f_code.co_filename) == here for frame in _frames())


def _frames() -> Iterator[FrameType]:
    """The frames of the calls that are under way, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
