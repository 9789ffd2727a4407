"""What a cache of keys and values in FP8 saves and changes, for `fp8.preflight`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..adapters.transformers import (
    cache_argument,
    cache_errors,
    cache_size,
    is_pretrained,
    kv_cache,
)
from ..common.step import Batch, evaluating

TOKENS = 8
"""The number of tokens of the pass that determines the shapes of a cache."""


def has_cache(model: Any, batch: Batch) -> bool:
    """Whether a model of transformers generates with a cache, and the batch has tokens for it."""
    if not is_pretrained(model):
        return False
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    uses = getattr(model.config, "use_cache", False) and model.can_generate()
    return bool(uses) and isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 1


@torch.no_grad()
def cache_found(model: Any, batch: Any, full: Any = None) -> dict[str, float]:
    """The bytes of a cache per token and sequence, and what it does to the logits of a batch.

    Args:
        model: for which `has_cache`; its weights give the logits.
        batch: its tokens, of which the first half is the prompt.
        full: the model whose bytes are counted, on the meta device; None: ``model``.

    Returns:
        "bytes" of `fp8.adapters.transformers.kv_cache` with its default scales, "bytes_bf16" of
        the same keys and values; "kl" and "largest" as in
        `fp8.adapters.transformers.CacheError`.

    Raises:
        ValueError: for a model with layers that keep other states.
    """
    counted = model if full is None else full
    cache = kv_cache(counted.config)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=next(counted.parameters()).device)
    with evaluating(model, counted):
        counted(ids, **{cache_argument(counted): cache}, use_cache=True)
        (row,) = cache_errors(model, batch["input_ids"], scalings=("token",))
    size = cache_size(cache)
    return {
        "bytes": size.bytes / TOKENS,
        "bytes_bf16": 2 * size.elements / TOKENS,
        "kl": row.kl,
        "largest": row.largest,
    }
