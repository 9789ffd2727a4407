"""`export`: writes a model trained in low precision for serving in it, as Transformers, vLLM and
SGLang read it. `fp8.checkpoints.layouts` lists the layouts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..common.dtensor import is_dtensor
from ..common.libraries import need
from ..common.mixin import check_module
from ..common.report import Report, Row
from .weights import Weights, weights


def export(model: nn.Module, folder: str | os.PathLike[str]) -> Report[Row]:
    """Writes ``model``, converted by `fp8.convert`, into ``folder`` for serving in low precision.

    A model of the library transformers gets the files of ``save_pretrained``; ``from_pretrained``,
    vLLM and SGLang read the folder. For other models, ``model.safetensors`` has the tensors of the
    state_dict under the same names, and ``fp8.json`` the quantization_config and, in "tied", the
    names that share a tensor with another one: name -> name.

    The weight of a linear layer is stored as its recipe casts it: e4m3 values times
    ``weight_scale`` (float32; (1,), or (outputs, 1) for "row") are the layer's operand. For "block"
    ``weight_scale_inv`` has a float32 per 128 x 128 block, for "mxfp8" ``weight_scale`` an E8M0
    byte per 32 inputs. For "nvfp4" ``weight_packed`` has two e2m1 values to a byte,
    ``weight_scale`` an e4m3 number per 16 inputs, and both divided by ``weight_global_scale``
    (float32) are the operand. That number is the same for layers beside each other, which engines
    fuse, and not each layer's own as in training: scales are within 2**-4 of the exact ones, as in
    training, but rounded otherwise.

    Inputs need no calibration: their scale is 1 for "unit", from the history for "delayed", and
    that of the layer for "static". For other recipes it is computed at serving time from the
    largest magnitude, without rounding up to a power of two; inputs of "nvfp4" are served in high
    precision. Everything else keeps its dtype. No layout supports a linear layer with a transposed
    weight (GPT-2's): its weight is rounded as its recipe casts it and stored in high precision.

    For a unit-scaled model the files are those of the plain model, with the weights that
    init="preserve" has. With init="unit" its factors are folded into weights and scales as in
    `unit_scaling.transforms.fold`, after the model has run once; for E8M0 scales, which are powers
    of two, they are multiplied into the weight before its cast.

    All processes of a sharded model (FSDP2, tensor parallelism) call it; the first one writes.

    Args:
        model: the converted model.
        folder: where to write; created if missing.

    Returns:
        A report with a row for each layer with a recipe: "FP8", "rounded", or left alone (in high
        precision), with the reason.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if nothing is in FP8; for layers of another library; for a "delayed" or "static"
            layer without a history; for factors that no weight can hold (modules of `unit_scaling`,
            and what `fold` rejects).
        ImportError: without safetensors.
    """
    check_module("export", model)
    need("safetensors")
    stream = weights(model)
    sharded = any(is_dtensor(p) for p in model.parameters())
    writes = not sharded or dist.get_rank() == 0
    tensors = {name: tensor for name, tensor in stream if writes}
    if writes:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write(stream, folder, tensors)
    if sharded:
        dist.barrier()
    return stream.report


def _write(stream: Weights, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the files."""
    model: Any = stream.model
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    if hasattr(model, "save_pretrained"):
        tensors |= {name: tensors[first] for name, first in stream.tied.items()}
        model.save_pretrained(folder, state_dict=tensors)
        path = folder / "config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content |= {} if stream.config is None else {"quantization_config": stream.config}
    else:
        path = folder / "fp8.json"
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        need("safetensors").save_file(whole, folder / "model.safetensors")
        content = {"quantization_config": stream.config, "tied": stream.tied}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")
