"""`torch.nn.functional.multi_head_attention_forward`, composed of calls that a mode can intercept.

torch computes it in one opaque function whose inner products no torch-function mode sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..context.active import product_recipe
from .attention import by_products


def projections(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: tuple[Tensor, ...],
    bias: Tensor | None,
    linear: Callable[..., Tensor] = F.linear,
) -> tuple[Tensor, ...]:
    """The projected query, key and value. weights: one for all, or one for each."""
    biases: tuple[Tensor | None, ...] = (None,) * 3 if bias is None else bias.chunk(3)
    if len(weights) == 1 and query is key and key is value:
        return linear(query, weights[0], bias).chunk(3, dim=-1)
    parts = weights[0].chunk(3) if len(weights) == 1 else weights
    inputs = (query, key, value)
    return tuple(linear(x, w, b) for x, w, b in zip(inputs, parts, biases, strict=True))


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype.is_floating_point:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def merge_masks(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """One additive mask that broadcasts to (batch, heads, L, S)."""
    mask = _additive(attn_mask, dtype)
    if mask is not None and mask.ndim == 3:
        mask = mask.view(batch, heads, *mask.shape[-2:])
    padded = _additive(padding, dtype)
    if padded is None:
        return mask
    padded = padded[:, None, None]
    return padded if mask is None else mask + padded


def check_masks(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, sizes: tuple[int, int]
) -> None:
    """Raises ValueError for masks that do not fit attention of ``sizes`` (L, S)."""
    allowed = {
        "attn_mask": (sizes, (batch * heads, *sizes)),
        "key_padding_mask": ((batch, sizes[1]),),
    }
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", padding)):
        if mask is not None and tuple(mask.shape) not in allowed[name]:
            shapes = " or ".join(map(str, allowed[name]))
            raise ValueError(f"{name} must have shape {shapes}, not {tuple(mask.shape)}")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Attention computed by separate products; returns the probabilities too."""
    recipe = product_recipe()
    if recipe is not None and recipe.attention:
        return by_products(q, k, v, mask, dropout_p)
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    if mask is not None:
        scores = scores + mask
    weights = F.dropout(F.softmax(scores, dim=-1), dropout_p, training=dropout_p > 0)
    return torch.matmul(weights, v), weights


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The torch function of the same name, with the same arguments.

    query (L, N, E), key and value (S, N, E), or without the batch dimension N. Returns the output
    (L, N, E) and, with need_weights, the probabilities (N, L, S), else None. With need_weights the
    product with the probabilities is a separate call, so a recipe rounds the probabilities.
    Without, the kernel of `scaled_dot_product_attention` keeps them in high precision. is_causal
    states that attn_mask is causal. As in torch, it is relied on only without key_padding_mask and
    need_weights. Raises NotImplementedError for bias_k, bias_v, add_zero_attn, static_k and
    static_v, and ValueError for masks of another shape and for is_causal without a mask.
    """
    extras = {"bias_k": bias_k, "bias_v": bias_v, "static_k": static_k, "static_v": static_v}
    used = [name for name, value in extras.items() if value is not None]
    used += ["add_zero_attn"] if add_zero_attn else []
    if used:
        raise NotImplementedError(f"multi-head attention with {', '.join(used)} is not supported")
    if is_causal and attn_mask is None:
        raise ValueError("is_causal is a hint about attn_mask: give the mask as well")
    batched = query.ndim == 3
    if not batched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, batch, width = query.shape
    sizes = (length, key.shape[0])
    check_masks(attn_mask, key_padding_mask, batch, num_heads, sizes)
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None
    if not causal:
        mask = merge_masks(attn_mask, key_padding_mask, batch, num_heads, query.dtype)
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights: Any = separate if use_separate_proj_weight else (in_proj_weight,)
    q, k, v = projections(query, key, value, weights, in_proj_bias)
    heads = (num_heads, width // num_heads)
    q, k, v = (t.unflatten(-1, heads).permute(1, 2, 0, 3) for t in (q, k, v))
    p = dropout_p if training else 0.0
    probabilities = None
    if need_weights:
        out, probabilities = _attend(q, k, v, mask, p)
        probabilities = probabilities.mean(1) if average_attn_weights else probabilities
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
    out = out.permute(2, 0, 1, 3).reshape(length, batch, width)
    out = F.linear(out, out_proj_weight, out_proj_bias)
    if not batched:
        out = out.squeeze(1)
        probabilities = None if probabilities is None else probabilities.squeeze(0)
    return out, probabilities
