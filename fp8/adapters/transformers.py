"""transformers: whether a model is one of its models, and a cache of keys and values that rounds
them to FP8, as an engine stores them, for `fp8.parity`."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from ..common.libraries import need
from ..common.validation import check_name
from ..formats.format import get_format
from ..formats.quantize import quantize
from ..recipes.scaling import scale_of

__all__ = ["KV_SCALINGS"]

KV_SCALINGS: dict[str, tuple[int, ...] | None] = {
    "tensor": None,
    "head": (-2, -1),
    "token": (-1,),
}
"""Scaling of a cache in FP8 -> the axes of keys and of values (batch, heads, tokens, width) that
share a scale, the next power of two; None: all."""


def is_pretrained(model: Any) -> bool:
    """Whether a model is one of transformers. Imports nothing of the library for other models."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def rounding_cache(model: Any, scaling: str) -> dict[str, Any]:
    """Arguments of a model of transformers: a cache whose keys and values are those of e4m3.

    It is for one pass, whose states determine the scales. Finite values beyond the format and Inf
    saturate; NaN stays NaN. scaling: a name in `KV_SCALINGS`. Raises ValueError for an unknown one.
    """
    check_name("scaling of a cache", scaling, KV_SCALINGS)
    base = need("transformers").cache_utils.DynamicCache

    def rounded(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = scale_of(wide, KV_SCALINGS[scaling], get_format("e4m3"), "up")
        return quantize(wide, "e4m3", scale=scale).to(x.dtype)

    def update(
        self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        return base.update(self, rounded(keys), rounded(values), *args, **kwargs)

    cache = type("RoundingCache", (base,), {"update": update})(config=model.config)
    # transformers 5.24 renames the argument.
    new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if new else "past_key_values": cache, "use_cache": True}
