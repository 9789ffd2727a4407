"""Activation checkpointing under modes: the recomputation must run under the mode again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from ..common.frames import frames


def checkpointed(
    mode: TorchFunctionMode, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``checkpoint(function, *args, **kwargs)`` with the mode active inside.

    For a mode that receives a call of ``torch.utils.checkpoint.checkpoint``. This happens only
    under torch.compile, which treats calls made by the mode as outside of the mode.
    """

    def within(*args: Any, **kwargs: Any) -> Any:
        TorchFunctionMode.__enter__(mode)
        try:
            return function(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(mode, None, None, None)

    return checkpoint(within, *args, **kwargs)


def in_reentrant() -> bool:
    """Whether the forward pass of a checkpoint with ``use_reentrant=True`` is running.

    It runs without gradients inside an autograd function and offers no other sign.
    """
    if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return False
    code = CheckpointFunction.forward.__code__
    return any(frame.f_code is code for frame in frames())


def in_recomputation() -> bool:
    """Whether a checkpoint with ``use_reentrant=False`` is recomputing in the backward pass."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return _in_checkpoint("recompute_fn")


def in_saving() -> bool:
    """Whether a checkpoint with ``use_reentrant=False`` saves a tensor of its recomputation, which
    it detaches."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return _in_checkpoint("pack_hook")


def in_backward() -> bool:
    """Whether the backward pass of an autograd function is running, as of a checkpoint with
    ``use_reentrant=True`` or of a reversible layer, which compute parts of a model again.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    code = BackwardCFunction.apply.__code__
    return any(frame.f_code is code for frame in frames())


def apart() -> AbstractContextManager[Any]:
    """Context in which a checkpoint with ``use_reentrant=False`` that is running neither sees nor
    counts the tensors that are saved."""
    if _in_checkpoint("checkpoint", "recompute_fn"):
        return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    return nullcontext()


def _in_checkpoint(*names: str) -> bool:
    """Whether one of these functions of `torch.utils.checkpoint` is running."""
    file = CheckpointFunction.forward.__code__.co_filename
    codes = (frame.f_code for frame in frames())
    return any(code.co_name in names and code.co_filename == file for code in codes)
