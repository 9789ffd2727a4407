"""transformers: whether a model is one of its models, and a cache of keys and values that rounds
them to FP8, as an engine stores them, for `fp8.parity`."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.libraries import need
from ..common.validation import check_name
from ..formats.quantize import quantize
from ..formats.rounding import divided
from ..recipes.scaling import largest_finite

__all__ = ["KV_SCALINGS", "CacheScaling"]


@dataclass(frozen=True)
class CacheScaling:
    """A row of `KV_SCALINGS`.

    Attributes:
        axes: the axes of keys and of values (batch, heads, tokens, width) that share a scale;
            None: all.
        key, value: what the largest magnitude is divided by, in float32; 0: the scale is 1.
    """

    axes: tuple[int, ...] | None = None
    key: float = 448.0
    value: float = 448.0

    def rounded(self, x: Tensor, most: float) -> Tensor:
        """``x`` in numbers of e4m3. most: `key` or `value`. Finite values beyond the format and Inf
        saturate; NaN stays NaN."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.new_ones(())
        if most and x.numel():
            scale = divided(largest_finite(wide, self.axes), most)
            scale = torch.where(scale > 0, scale, 1.0)
        return quantize(wide, "e4m3", scale=scale).to(x.dtype)


KV_SCALINGS: dict[str, CacheScaling] = {
    "unit": CacheScaling(key=0.0, value=0.0),
    "tensor": CacheScaling(),
    "vllm": CacheScaling(key=200.0, value=100.0),
    "head": CacheScaling((-2, -1)),
    "token": CacheScaling((-1,)),
}
"""Scaling of a cache in FP8 -> its row. "unit": what vLLM and SGLang do without scales in the
checkpoint. "tensor": the scales that compressed-tensors stores. "vllm": ``calculate_kv_scales``
(vllm/attention/layer.py: K_SCALE_CONSTANT, V_SCALE_CONSTANT)."""


def is_pretrained(model: Any) -> bool:
    """Whether a model is one of transformers. Imports nothing of the library for other models."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def rounding_cache(model: Any, scaling: str) -> dict[str, Any]:
    """Arguments of a model of transformers: a cache whose keys and values are rounded to e4m3.

    It is for one pass, whose states determine the scales. scaling: a name in `KV_SCALINGS`. Raises
    ValueError for an unknown one.
    """
    check_name("scaling of a cache", scaling, KV_SCALINGS)
    row = KV_SCALINGS[scaling]
    base = need("transformers").cache_utils.DynamicCache

    def update(
        self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        keys = row.rounded(keys, row.key)
        values = row.rounded(values, row.value)
        return base.update(self, keys, values, *args, **kwargs)

    cache = type("RoundingCache", (base,), {"update": update})(config=model.config)
    # transformers 5.24 renames the argument.
    new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if new else "past_key_values": cache, "use_cache": True}
