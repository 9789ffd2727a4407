"""Attention under a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..casts.casting import cast_backward, cast_forward
from ..casts.counts import product_name
from ..context.active import histories, product_recipe
from .matmul import to_autocast_dtype
from .summed import warn_unsummed

__all__ = ["attention", "flex_attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    unit: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with operands cast under the recipe of the
    enclosing `fp8.autocast`.

    query (..., L, E), key (..., S, E), value (..., S, V) -> (..., L, V). The other arguments, the
    errors and the treatment of NaN and of fully masked rows are those of PyTorch. unit: as in
    `fp8.products.matmul.linear`.

    Query, key and value are cast as the recipe's input, and the gradient of the output as its grad.
    The kernel is fused: its probabilities and inner gradients stay in high precision. Its backward
    pass reuses the operands cast in the forward pass: query and key along E, value along S; the
    gradient is cast along V.
    """

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value, mask = to_autocast_dtype(query, key, value, attn_mask)
        return torch.ops.aten.scaled_dot_product_attention.default(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    (y,) = _cast_around(lambda *operands: (kernel(*operands),), query, key, value, unit)
    return y


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """The operator behind `torch.nn.attention.flex_attention`, with operands cast as in
    `attention`.

    query (B, H, L, E), key (B, K, S, E), value (B, K, S, V); the other arguments are those of
    PyTorch. Returns the output (B, H, L, V) and statistics of its rows.
    """
    kernel = torch.ops.higher_order.flex_attention
    return _cast_around(lambda *operands: kernel(*operands, *args, **kwargs), query, key, value)


def _cast_around(
    kernel: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    unit: bool = False,
) -> tuple[Tensor, ...]:
    """Runs ``kernel`` on cast operands, and casts the gradient of its first result."""
    recipe = product_recipe(unit)
    if recipe is None:
        return kernel(query, key, value)
    warn_unsummed(recipe, "attention")
    name, cast = product_name("attention", None, recipe), recipe.input
    *of, of_grad = histories(recipe, "attention", (query,), cast, cast, cast, recipe.grad)
    query = cast_forward(query, cast, -1, of[0], name, "query")
    key = cast_forward(key, cast, -1, of[1], name, "key")
    value = cast_forward(value, cast, -2, of[2], name, "value")
    y, *rest = kernel(query, key, value)
    return cast_backward(y, recipe.grad, -1, of_grad, name), *rest
