"""Scaled dot-product attention."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from fp8.attention import attention

from ..core.functional import logarithmic_interpolation
from ..ops import Scales, row
from ..scale import scale_output

__all__ = ["scaled_dot_product_attention"]


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
) -> Scales:
    """Between a uniform average of the values (small logits) and one of them (large logits).

    The interpolation weight is measured, as a function of the standard deviation of the logits,
    mult * scale * sqrt(width): 1 / (1 + 4 / std**2) (u-muP, arXiv 2407.17465, appendix B).
    One factor for all, because query, key and value come from the same activations.
    """
    width = query.shape[-1]
    std = mult * (1 / width if scale is None else scale) * math.sqrt(width)
    alpha = 1 / (1 + 4 / std**2) if std else 0.0
    factor = 1 / logarithmic_interpolation(alpha, _average_std(value.shape[-2], is_causal), 1)
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
) -> Tensor:
    """``s * softmax(mult * scale * query @ key.T) @ value``.

    query: (..., L, E). key: (..., S, E). value: (..., S, V). attn_mask: broadcastable to
    (..., L, S), boolean or added to the logits; the factor s does not depend on it. scale: 1/E by
    default, as muP asks, where torch's default is 1/sqrt(E). Returns (..., L, V).
    s depends on S: a cached prompt of another length computes with another factor.
    """
    s = scaled_dot_product_attention_scales(query, value, dropout_p, is_causal, mult, scale)
    temperature = mult * (1 / query.shape[-1] if scale is None else scale)
    output = attention(query, key, value, attn_mask, dropout_p, is_causal, temperature, enable_gqa)
    return scale_output(output, s["output"], s["value"], fresh=False)
