"""Scaled dot-product attention and rotary position embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8.products.attention import attention, by_products, is_fused

from ..rules.table import Scales, row
from ..scale import scale_bwd, scale_output

HIDDEN = -1000.0
"""A mask hides a key by a bias of at most this, whose exponential is 0 in every dtype: by -inf,
torch.finfo(dtype).min, or the -1e4 and -1e9 of older models."""


def _mean_square(length: int, is_causal: bool) -> float:
    """The mean square of a uniform average of uncorrelated rows: of all, or of those so far if
    causal, about log(length)/length."""
    # log(1) is 0: unit-scaling 0.3.5 refuses a prompt of one token.
    if length <= 1:
        return 1.0
    if is_causal:
        # log2, which stays symbolic in a graph; with log, each length would be compiled
        return math.log2(length) * math.log(2) / length
    return 1.0 / length


def _masked_mean_square(mask: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """`_mean_square` for a mask: the mean over queries of one over the number of keys that each
    sees; queries that see none are left out. The result is a tensor: to read its value would
    synchronize a device, break a graph and fail under `torch.vmap`.

    A finite bias is a logit, which a model may learn; a factor that depends on it would add a term
    to its gradient.
    """
    shown = mask.detach()
    if mask.dtype != torch.bool:
        shown = shown > HIDDEN
    seen = shown.expand(*mask.shape[:-1], keys).sum(-1, dtype=dtype)
    sees = seen > 0
    mean = (sees / seen.clamp(min=1)).sum() / sees.sum().clamp(min=1)
    mean = mean.clamp(min=_mean_square(keys, False))  # where no query sees a key
    if mask.dim() < 2 or mask.shape[-2] != keys:
        return mean
    # u-muP, and unit-scaling 0.3.5 for is_causal, approximate the sum of 1/n up to keys, which is
    # about log(keys) + 0.58, by the logarithm: a causal mask has the factor of is_causal.
    ordinal = torch.ones_like(seen).cumsum(-1)  # not arange: it is no DTensor
    causal = (seen == ordinal).all()
    return torch.where(causal, _mean_square(keys, True), mean)


def scaled_dot_product_attention_scales(
    query: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    scale: float | None = None,
    context_length: int | None = None,
    attn_mask: Tensor | None = None,
) -> Scales:
    """Between a uniform average of the values (small logits) and one of them (large logits).

    The weight is 1 / (1 + 4 / std**2), a fit, for logits of standard deviation std = mult * scale *
    sqrt(width). One factor for all: query, key and value are computed from the same activations.
    With a mask it is a tensor that follows from the number of keys each query sees, unless
    is_causal or context_length gives that number. Source: u-muP, arXiv 2407.17465, appendix B.
    """
    width = query.shape[-1]
    length = value.shape[-2]
    if scale is None:
        scale = 1 / width
    std = mult * scale * math.sqrt(width)
    alpha = 1 / (1 + 4 / std**2) if std else 0.0
    if context_length is not None:
        length = context_length
    average: Any = _mean_square(length, is_causal)
    if attn_mask is not None and not is_causal and context_length is None:
        dtype = torch.promote_types(value.dtype, torch.float32)
        average = _masked_mean_square(attn_mask, length, dtype)
    # 1 over the logarithmic interpolation between the RMS of the average and 1
    factor = average ** ((alpha - 1) / 2)
    if 0 < dropout_p < 1:
        factor *= math.sqrt(1 - dropout_p)
    return {"output": factor, "query": factor, "key": factor, "value": factor}


@row(scaled_dot_product_attention_scales, replaces=(F.scaled_dot_product_attention,))
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    context_length: int | None = None,
) -> Tensor:
    """Computes ``s * softmax(mult * scale * query @ key.T) @ value``.

    Args:
        query: (..., L, E).
        key: (..., S, E).
        value: (..., S, V).
        attn_mask: broadcastable to (..., L, S), boolean or added to the logits. s follows from the
            number of keys that each query sees, which are those with a bias above -1000.
        is_causal: as in torch; with ``attn_mask``, it only declares the mask causal, for s, and the
            mask is not read for s.
        mult: a factor of the logits.
        scale: by default 1/E, as in muP; torch's default is 1/sqrt(E).
        context_length: the number of keys that s is computed for instead of S and the mask, such as
            the maximum sequence length, so that s is the same for all lengths and all masks.

    Returns:
        (..., L, V).

    Raises:
        ValueError: context_length is below 1.
    """
    if context_length is not None and context_length < 1:
        raise ValueError(f"context_length must be 1 or more, got {context_length}")
    if scale is None:
        scale = 1 / query.shape[-1]
    settings = (dropout_p, is_causal, mult, scale, context_length)
    s = scaled_dot_product_attention_scales(query, value, *settings)
    options = (dropout_p, is_causal and attn_mask is None, mult * scale, enable_gqa)
    fused = is_fused(query, key, value, attn_mask, dropout_p, enable_gqa)
    grad_scale = None
    if not fused:
        grad_scale = _score_grad_scale(s, value, context_length)
    mask = _divided(attn_mask, grad_scale)
    output = attention(
        query, key, value, mask, *options, unit=True, grad_scale=grad_scale
    )
    if attn_mask is not None:
        s = scaled_dot_product_attention_scales(query, value, *settings, attn_mask)
    return _scaled(output, s)


def _scaled(output: Tensor, s: Scales) -> Tensor:
    """``output`` by the one factor of the rule: a number, or a tensor where a mask was read."""
    if isinstance(s["output"], Tensor):
        return output * s["output"]
    return scale_output(output, s["output"], s["value"])


def _score_grad_scale(s: Scales, value: Tensor, context_length: int | None) -> float:
    """The power of two that brings the gradient of the scores to about the RMS of the output's: P *
    (G @ value.T), less its mean, with P the probabilities, whose mean square times the number of
    keys s["output"] brings to 1, and G the gradient. The result is a
    number: s is computed without a mask."""
    keys, width = value.shape[-2:]
    if context_length is not None:
        keys = context_length
    ratio = math.sqrt(max(1, width) / max(1, keys)) / s["output"]
    return 2.0 ** -round(math.log2(ratio))


def _divided(mask: Tensor | None, grad_scale: float | None) -> Tensor | None:
    """``mask``, whose gradient is the gradient of the scores without ``grad_scale``."""
    if mask is not None and mask.requires_grad and grad_scale not in (None, 1.0):
        return scale_bwd(mask, 1 / grad_scale)
    return mask


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    mult: float,
    context_length: int | None,
) -> tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention` by separate products, and its probabilities (..., L, S).
    attn_mask: added to the logits. is_causal: whether it is causal."""
    settings = (dropout_p, is_causal, mult, None, context_length)
    s = scaled_dot_product_attention_scales(query, value, *settings)
    grad_scale = _score_grad_scale(s, value, context_length)
    options = (dropout_p, False, mult / query.shape[-1])
    mask = _divided(attn_mask, grad_scale)
    output, weights = by_products(
        query, key, value, mask, *options, unit=True, grad_scale=grad_scale
    )
    s = scaled_dot_product_attention_scales(query, value, *settings, attn_mask)
    if grad_scale != 1.0:
        weights = scale_bwd(weights, grad_scale)
    return _scaled(output, s), weights


def rotary_scales() -> Scales:
    """Rotations keep the scale in both directions."""
    return {"output": 1.0, "input": 1.0}


@row(rotary_scales)
def rotary(
    input: Tensor, positions: Tensor | None = None, base: float = 10000.0
) -> Tensor:
    """Rotates feature i with feature i + width/2 by position * base ** (-2 i / width), as in Llama,
    in at least float32.

    Args:
        input: (..., length, width), floating point.
        positions: broadcastable to (..., length); by default 0 to length - 1.
        base: the base of the angles.

    Raises:
        ValueError: the width is odd.

    Source: Su et al. 2021, arXiv 2104.09864.
    """
    length, width = input.shape[-2:]
    if width % 2:
        raise ValueError(f"rotary needs an even number of features, got {width}")
    dtype = torch.promote_types(input.dtype, torch.float32)
    if positions is None:
        positions = torch.arange(length, device=input.device)
    exponents = torch.arange(0, width, 2, device=input.device, dtype=dtype) / width
    angles = positions.to(dtype).unsqueeze(-1) * base**-exponents
    cos = angles.cos()
    sin = angles.sin()
    first, second = input.to(dtype).chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos - second * sin, second * cos + first * sin), dim=-1
    )
    return rotated.to(input.dtype)
