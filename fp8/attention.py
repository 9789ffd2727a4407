"""Attention under a recipe."""

from __future__ import annotations

import torch
from torch import Tensor

from .matmul import active_recipe, cast_backward, cast_forward, to_autocast_dtype
from .recipe import Recipe

__all__ = ["attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: Recipe | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with operands cast under the recipe.

    query (..., L, E), key (..., S, E), value (..., S, V) -> (..., L, V).
    Query, key and value are cast as the recipe's input and the gradient of the output as its
    grad. The probabilities stay in high precision inside the fused kernel, as they do where FP8
    is applied around a fused attention kernel instead of within it.
    """
    recipe = recipe or active_recipe()
    if recipe is not None:
        query, key, value = (cast_forward(t, recipe.input) for t in (query, key, value))
    query, key, value = to_autocast_dtype(query, key, value)
    y = torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return cast_backward(y, recipe.grad) if recipe is not None else y
