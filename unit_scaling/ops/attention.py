"""Scaled dot-product attention, and the rotation of its queries and keys by position."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8.products.attention import attention
from fp8.products.matmul import matmul as matrix_product

from ..core.functional import logarithmic_interpolation
from ..rules.table import Scales, row
from ..scale import scale_output

__all__ = ["rotary", "scaled_dot_product_attention"]


def _average_std(length: int, is_causal: bool) -> float:
    """The RMS of a uniform average of independent rows: of all of them, or of those so far.

    Causal: row t averages t values, so the mean square is about log(length)/length. One row is
    returned as it is.
    """
    if length <= 1:
        return 1.0
    return math.sqrt((math.log(length) if is_causal else 1.0) / length)


def scaled_dot_product_attention_scales(
    query: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    scale: float | None = None,
    context_length: int | None = None,
) -> Scales:
    """Between a uniform average of the values (small logits) and one of them (large logits).

    The interpolation weight is measured, as a function of the standard deviation of the logits,
    mult * scale * sqrt(width): 1 / (1 + 4 / std**2) (u-muP, arXiv 2407.17465, appendix B).
    One factor for all, because query, key and value come from the same activations.
    """
    width = query.shape[-1]
    length = value.shape[-2] if context_length is None else context_length
    std = mult * (1 / width if scale is None else scale) * math.sqrt(width)
    alpha = 1 / (1 + 4 / std**2) if std else 0.0
    factor = 1 / logarithmic_interpolation(alpha, _average_std(length, is_causal), 1)
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
    """``s * softmax(mult * scale * query @ key.T) @ value``.

    query: (..., L, E). key: (..., S, E). value: (..., S, V). Returns (..., L, V).
    attn_mask: broadcastable to (..., L, S), boolean or added to the logits; the factor s does not
    depend on it. is_causal: with attn_mask, it only says that this mask is causal, for the sake of
    s; without, it is torch's. scale: 1/E by default, as muP asks, where torch's default is
    1/sqrt(E). enable_gqa: query may have a multiple of the heads of key and value, as in torch.
    context_length: what s is worked out for in place of S, so that it is the same at any length:
    that of the longest sequence the model is for. Raises ValueError where it is below 1.
    """
    if context_length is not None and context_length < 1:
        raise ValueError(f"context_length must be 1 or more, got {context_length}")
    settings = (dropout_p, is_causal, mult, scale, context_length)
    s = scaled_dot_product_attention_scales(query, value, *settings)
    temperature = mult * (1 / query.shape[-1] if scale is None else scale)
    causal = is_causal and attn_mask is None
    given = (attn_mask, dropout_p, causal, temperature, enable_gqa)
    output = attention(query, key, value, *given, unit=True)
    return scale_output(output, s["output"], s["value"], fresh=False)


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

    attn_mask: added to the logits. is_causal: whether it is causal.
    """
    settings = (dropout_p, is_causal, mult, None, context_length)
    s = scaled_dot_product_attention_scales(query, value, *settings)
    temperature = mult / query.shape[-1]
    logits = matrix_product(query, key.mT, scales=(temperature,) * 3, unit=True)
    logits = logits if attn_mask is None else logits + attn_mask
    weights = F.dropout(F.softmax(logits, dim=-1), dropout_p)
    scales = (s["output"], s["value"], s["value"])
    return matrix_product(weights, value, scales=scales, unit=True), weights


def rotary_scales() -> Scales:
    """A rotation keeps the scale, in both directions."""
    return {"output": 1.0, "input": 1.0}


@row(rotary_scales)
def rotary(input: Tensor, positions: Tensor | None = None, base: float = 10000.0) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864): a rotation by position.

    input: (..., length, width), width even: feature i is rotated with feature i + width/2 by
    position * base ** (-2 i / width), as in Llama. positions: numbers that broadcast to
    (..., length), 0 to length - 1 by default. Computed in float32 at least, and rounded to the
    dtype of input. Raises ValueError for an odd width.
    """
    length, width = input.shape[-2:]
    if width % 2:
        raise ValueError(f"rotary needs an even number of features, got {width}")
    dtype = torch.promote_types(input.dtype, torch.float32)
    if positions is None:
        positions = torch.arange(length, device=input.device)
    exponents = torch.arange(0, width, 2, device=input.device, dtype=dtype) / width
    angles = positions.to(dtype).unsqueeze(-1) * base**-exponents
    cos, sin = angles.cos(), angles.sin()
    first, second = input.to(dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(input.dtype)
