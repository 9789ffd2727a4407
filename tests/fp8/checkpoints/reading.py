"""Reads exported weights by compressed-tensors alone, without transformers."""

from typing import Any

import torch
from torch import Tensor, nn

import fp8


def loaded(
    model: nn.Module, tensors: dict[str, Tensor], config: dict[str, Any]
) -> nn.Module:
    """A plain ``model`` with exported ``tensors`` under their quantization_config."""
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
    )

    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    quantized = [m for m in model.modules() if hasattr(m, "quantization_scheme")]
    for module in quantized:
        compress_module(module)
    model.load_state_dict(tensors, strict=True)
    for module in quantized:
        decompress_module(module)
    return model


def exact(scaling: str) -> fp8.Recipe:
    """With scales as compressed-tensors finds them: amax / 448."""
    cast = fp8.Cast(format="e4m3", scaling=scaling, rule="exact")
    return fp8.Recipe(name=f"exact, by {scaling}", input=cast, weight=cast)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors have the same dtype and values."""
    return a.dtype == b.dtype and torch.equal(a.float(), b.float())
