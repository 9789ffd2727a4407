"""Reads exported weights by compressed-tensors alone, without transformers."""

import pytest
import torch

import fp8


def compressed_tensors():
    """Its modules, without which a test is skipped."""
    names = "compressors", "quantization"
    return [pytest.importorskip(f"compressed_tensors.{name}") for name in names]


def loaded(model, tensors, config):
    """A plain ``model`` with exported ``tensors`` under their quantization_config."""
    compressors, quantization = compressed_tensors()
    settings = quantization.QuantizationConfig.model_validate(config)
    quantization.apply_quantization_config(model, settings)
    quantized = [m for m in model.modules() if hasattr(m, "quantization_scheme")]
    for module in quantized:
        compressors.compress_module(module)
    model.load_state_dict(tensors, strict=True)
    for module in quantized:
        compressors.decompress_module(module)
    return model


def exact(scaling):
    """With scales as compressed-tensors finds them: amax / 448."""
    cast = fp8.Cast(format="e4m3", scaling=scaling, rule="exact")
    return fp8.Recipe(name=f"exact, by {scaling}", input=cast, weight=cast)


def same(a, b):
    """Whether two plain tensors have the same dtype and values."""
    return a.dtype == b.dtype and torch.equal(a.float(), b.float())
