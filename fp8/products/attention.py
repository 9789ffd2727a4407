"""Attention under a recipe: torch's fused kernel on cast operands.

`torch.nn.functional.multi_head_attention_forward` is one opaque function, whose inner products no
torch-function mode sees: here it is composed of calls that a mode can intercept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import cast_backward, cast_forward
from ..casts.counts import product_name
from ..casts.rotation import without_autocast
from ..recipes.recipe import Recipe
from ..torch_internals import Arguments, Keywords
from .active import histories, product_recipe, warn_unsummed
from .matmul import matmul, to_autocast_dtype


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
    grad_scale: float | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with operands cast under the recipe of the
    enclosing `fp8.autocast`.

    query (..., L, E), key (..., S, E), value (..., S, V) -> (..., L, V). The other arguments, the
    errors and the treatment of NaN and of fully masked rows are PyTorch's. Query and key are cast
    as the recipe's input along E, value along S, and the gradient of the output as its grad along
    V; what is between is not cast. unit: as in `fp8.products.matmul.linear`. grad_scale: not None
    where `is_fused` is false: two products are computed then, as in `by_products`.
    """
    settings = (attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if grad_scale is not None:
            options: Keywords = {"cast": False, "grad_scale": grad_scale}
            return by_products(query, key, value, *settings, **options)[:1]
        query, key, value = to_autocast_dtype(query, key, value)
        mask = attn_mask
        if mask is not None:
            (mask,) = to_autocast_dtype(mask)
        y = torch.ops.aten.scaled_dot_product_attention.default(
            query,
            key,
            value,
            mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return (y,)

    return _cast_around(kernel, query, key, value, product_recipe(unit))[0]


_FUSES_MORE = torch.__version__ >= "2.14"


def is_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
) -> bool:
    """Whether torch computes attention without separate products, as far as that depends on shapes.

    Its CPU kernel takes operands of four dimensions and one width that do not broadcast, no
    dropout, and masks of two or four dimensions without a gradient. Other devices have a kernel for
    all of these.
    """
    # `use_flash_attention_cpp` in torch's sdp_utils_cpp.cpp.
    if query.device.type != "cpu":
        return True
    if dropout_p or query.shape[-1] != value.shape[-1]:
        return False
    masks = [2, 4]
    # From torch 2.14 on, three dimensions are one batch.
    if _FUSES_MORE and query.ndim == key.ndim == value.ndim == 3:
        query, key, value = query[None], key[None], value[None]
        masks = [2, 3, 4]
    if query.ndim != 4:
        return False
    q, k, v = query.shape[:2], key.shape[:-2], value.shape[:-2]
    if attn_mask is not None:
        broadcasts = attn_mask.ndim < 4 or attn_mask.shape[0] in (1, q[0])
        if attn_mask.ndim not in masks or attn_mask.requires_grad or not broadcasts:
            return False
    # From torch 2.14 on, one head of keys and values serves all of the query.
    one_head = _FUSES_MORE and k == v == (q[0], 1)
    return enable_gqa or q == k == v or one_head


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """The operator behind `torch.nn.attention.flex_attention`, with operands cast as in
    `attention`. Returns the output (B, H, L, V) and statistics of its rows."""

    def kernel(*operands: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.higher_order.flex_attention(*operands, *args, **kwargs)

    return _cast_around(kernel, query, key, value, product_recipe())


def _cast_around(
    kernel: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe | None,
) -> tuple[Tensor, ...]:
    """Runs ``kernel`` on cast operands, and casts the gradient of its first result."""
    if recipe is None:
        return kernel(query, key, value)
    warn_unsummed(recipe, "attention")
    name, cast = product_name("attention", None, recipe), recipe.input
    states = histories(recipe, "attention", query, key, value)
    query = cast_forward(query, cast, -1, states.a, name, "query")
    key = cast_forward(key, cast, -1, states.b, name, "key")
    value = cast_forward(value, cast, -2, states.value, name, "value")
    y, *statistics = kernel(query, key, value)
    return cast_backward(y, recipe.grad, states.grad, name), *statistics


def by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    unit: bool = False,
    cast: bool = True,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attention as two products, each cast under the recipe of the enclosing `fp8.autocast`.

    Arguments as in `attention`. Returns the output (..., L, V) and the probabilities (..., L, S)
    after dropout, before the cast. What is between both products is computed in at least float32,
    as in a fused kernel. Key and value are cast after enable_gqa has repeated their heads. A fully
    masked row gives zeros. NaN propagates. cast: False for products without casts. grad_scale: a
    factor of the gradients of probabilities, scores and attn_mask, by which the gradients of query
    and key are divided. Raises ValueError for is_causal with a mask, and for heads that key or
    value do not divide; TypeError for operands of different dtypes.
    """
    dtypes = [str(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1:
        raise TypeError(f"query, key and value need one dtype, got {', '.join(dtypes)}")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal=True needs attn_mask=None, got both")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if enable_gqa:
        key, value = _repeated(query, key, "key"), _repeated(query, value, "value")
    multiply = functools.partial(matmul, unit=unit, cast=cast)
    (like,) = to_autocast_dtype(query[:0])
    # In at least float32 between the products, as in a fused kernel.
    wide = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query):
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
        scores = multiply(
            query, key.mT, scales=(scale, scale / grad_scale, scale / grad_scale)
        )
        scores = _masked(scores, attn_mask, is_causal)
        rows = None
        if attn_mask is not None:
            # A row without an admitted key is 0 in a fused kernel, and NaN in a softmax.
            rows = (scores == -math.inf).all(-1, keepdim=True)
            scores = scores.masked_fill(rows, 0.0)
        weights = scores.softmax(-1)
        if dropout_p:
            weights = F.dropout(weights, dropout_p)
        y = multiply(weights, value, scales=(1, grad_scale, 1))
        if rows is not None:
            y, weights = y.masked_fill(rows, 0.0), weights.masked_fill(rows, 0.0)
    return y.to(like.dtype), weights.to(like.dtype)


def _masked(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        shape, device = scores.shape[-2:], scores.device
        mask = torch.ones(shape, dtype=torch.bool, device=device).tril()
    if mask is None:
        return scores
    if mask.dtype.is_floating_point:
        return scores + mask
    return scores.masked_fill(~mask, -math.inf)


def _repeated(query: Tensor, x: Tensor, name: str) -> Tensor:
    """``x`` with as many heads as the query."""
    heads, of = query.shape[-3], x.shape[-3]
    if heads % of:
        raise ValueError(
            f"enable_gqa needs heads that divide {heads}, got {of} of the {name}"
        )
    if heads == of:
        return x
    return x.repeat_interleave(heads // of, dim=-3)


# Multi-head attention


def projections(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: tuple[Tensor, ...],
    bias: Tensor | None,
    linear: Callable[..., Tensor] = F.linear,
) -> tuple[Tensor, ...]:
    """The projected query, key and value. weights: one for all, or one for each."""
    biases: tuple[Tensor | None, ...] = (None,) * 3
    if bias is not None:
        biases = bias.chunk(3)
    if len(weights) == 1 and query is key and key is value:
        return linear(query, weights[0], bias).chunk(3, dim=-1)
    if len(weights) == 1:
        weights = weights[0].chunk(3)
    of_query, of_key, of_value = weights
    q, k = linear(query, of_query, biases[0]), linear(key, of_key, biases[1])
    return q, k, linear(value, of_value, biases[2])


def merge_masks(
    attn_mask: Tensor | None,
    padding: Tensor | None,
    batch: int,
    heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """One additive mask that broadcasts to (batch, heads, *sizes), of attention of sizes (L, S).
    Raises ValueError for masks that do not fit."""
    names = ("attn_mask", attn_mask), ("key_padding_mask", padding)
    allowed = ((sizes, (batch * heads, *sizes)), ((batch, sizes[1]),))
    for (name, given), fit in zip(names, allowed, strict=True):
        if given is not None and tuple(given.shape) not in fit:
            shapes = " or ".join(map(str, fit))
            raise ValueError(
                f"{name} must have shape {shapes}, not {tuple(given.shape)}"
            )
    mask, padded = _additive(attn_mask, dtype), _additive(padding, dtype)
    if mask is not None and mask.ndim == 3:
        mask = mask.view(batch, heads, *mask.shape[-2:])
    if padded is None:
        return mask
    padded = padded[:, None, None]
    if mask is None:
        return padded
    return mask + padded


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of multi-head attention, in which True forbids, as what is added to the scores."""
    if mask is None or mask.dtype.is_floating_point:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


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
    (L, N, E) and the probabilities (N, L, S), which a recipe rounds, or None without need_weights.
    is_causal is relied on only without key_padding_mask and need_weights, as in torch. Raises
    NotImplementedError for bias_k, bias_v, add_zero_attn, static_k and static_v, and ValueError for
    masks of another shape and for is_causal without a mask.
    """
    extras = {
        "bias_k": bias_k,
        "bias_v": bias_v,
        "static_k": static_k,
        "static_v": static_v,
        "add_zero_attn": add_zero_attn or None,
    }
    used = [name for name, value in extras.items() if value is not None]
    if used:
        raise NotImplementedError(
            f"multi-head attention with {', '.join(used)} is not supported"
        )
    if is_causal and attn_mask is None:
        raise ValueError("is_causal is a hint about attn_mask: give the mask as well")
    batched = query.ndim == 3
    if not batched:
        query, key, value = query[:, None], key[:, None], value[:, None]
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
    length, batch, width = query.shape
    sizes = (length, key.shape[0])
    causal = is_causal and key_padding_mask is None and not need_weights
    masks = (attn_mask, key_padding_mask)
    mask = None if causal else merge_masks(*masks, batch, num_heads, sizes, query.dtype)
    weights: Arguments = (in_proj_weight,)
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    q, k, v = projections(query, key, value, weights, in_proj_bias)
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    p, probabilities = dropout_p * training, None
    if need_weights:
        out, probabilities = _with_probabilities(q, k, v, mask, p)
        if average_attn_weights:
            probabilities = probabilities.mean(1)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
    out = out.permute(2, 0, 1, 3).reshape(length, batch, width)
    out = F.linear(out, out_proj_weight, out_proj_bias)
    if batched:
        return out, probabilities
    if probabilities is not None:
        probabilities = probabilities.squeeze(0)
    return out.squeeze(1), probabilities


def _with_probabilities(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    if mask is not None:
        scores = scores + mask
    probabilities = F.dropout(F.softmax(scores, dim=-1), p, training=p > 0)
    return torch.matmul(probabilities, v), probabilities
