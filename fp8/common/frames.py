"""Which functions of torch are running in this thread, by its frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch

__all__ = ["PIPELINING", "frames", "refuse_split_graphs"]

PIPELINING = "torch.distributed.pipelining"


def frames() -> Iterator[FrameType]:
    """The frames of the active calls, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def refuse_split_graphs() -> None:
    """Raises RuntimeError where `torch.distributed.pipelining.pipeline` exports a model to train
    its parts: an exported program has no backward pass of an autograd function."""
    library = sys.modules.get(PIPELINING)
    if library is None or torch.compiler.is_dynamo_compiling():  # which traces no frames
        return
    code = library.pipeline.__code__
    if any(frame.f_code is code for frame in frames()):
        raise RuntimeError(
            "torch.distributed.pipelining.pipeline splits the graph of torch.export, which leaves "
            "out the backward passes of casts and scale factors, so its stages would not train. "
            "Make the stages of modules: PipelineStage(part, ...) for each part of the model"
        )
