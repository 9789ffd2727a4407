"""What `torch.distributed.pipelining` is doing in this thread.

Works around: its ``pipeline`` (torch 2.11 to 2.14) splits an exported program, which has no
backward passes of autograd functions, and a stage infers shapes by a run on uninitialized tensors,
which no state of a recipe may read. Neither says so.
"""

from __future__ import annotations

import sys

import torch

from .running_calls import running

_PIPELINING = "torch.distributed.pipelining"


def refuse_split_graphs() -> None:
    """Raises RuntimeError while `torch.distributed.pipelining.pipeline` exports a model: an
    exported program has no backward pass of autograd functions."""
    library = sys.modules.get(_PIPELINING)
    if library is not None and "pipeline" in running(
        library.pipeline.__code__.co_filename
    ):
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
    names = running(stage.__file__)
    return bool(names) and not any(name.endswith("one_chunk") for name in names)
