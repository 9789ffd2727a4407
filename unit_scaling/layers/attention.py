"""Attention with projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fp8.products.attention import merge_masks, projections

from .. import functional as U
from ..ops.attention import attention_with_weights
from .linear import Linear
from .scaled import MULT, Normal

__all__ = ["MHSA", "MultiheadAttention"]

CONTEXT_LENGTH = MULT.replace(
    name="context_length", default=None, annotation=int | None
)


class MHSA(nn.Module):
    """Multi-head self-attention. Input and output are (..., length, hidden_size).

    Args:
        heads: the number of heads, a divisor of ``hidden_size``.
        is_causal: whether each token attends only to itself and earlier ones.
        dropout_p: the dropout probability of attention weights, in training only.
        mult: the inverse of the softmax's temperature.
        kv_heads: the number of key and value heads, a divisor of ``heads``; by default ``heads``.
        rotary_base: the base of `unit_scaling.functional.rotary`; None for no positions.
        context_length: see `unit_scaling.functional.scaled_dot_product_attention`.

    Raises:
        ValueError: ``heads`` or ``kv_heads`` is no divisor.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        is_causal: bool,
        dropout_p: float = 0.0,
        mult: float = 1.0,
        kv_heads: int | None = None,
        rotary_base: float | None = None,
        context_length: int | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or hidden_size % heads:
            raise ValueError(
                f"heads must divide hidden_size {hidden_size}: got {heads}"
            )
        self.heads = heads
        self.kv_heads = heads
        if kv_heads is not None:
            self.kv_heads = kv_heads
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads {heads}: got {kv_heads}")
        self.dropout_p, self.is_causal, self.mult = dropout_p, is_causal, mult
        self.rotary_base, self.context_length = rotary_base, context_length
        width = hidden_size // heads
        self.linear_qkv = Linear(hidden_size, (heads + 2 * self.kv_heads) * width)
        self.linear_o = Linear(hidden_size, hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        # (..., length, heads * width), three kinds of heads -> (..., heads, length, width)
        groups = (self.heads, self.kv_heads, self.kv_heads)
        heads = self.linear_qkv(input).unflatten(-1, (sum(groups), -1))
        query, key, value = heads.transpose(-3, -2).split(groups, dim=-3)
        if self.rotary_base is not None:
            query = U.rotary(query, base=self.rotary_base)
            key = U.rotary(key, base=self.rotary_base)
        attended = U.scaled_dot_product_attention(
            query,
            key,
            value,
            # In training alone, unlike in 0.3.5.
            dropout_p=self.dropout_p * self.training,
            is_causal=self.is_causal,
            mult=self.mult,
            enable_gqa=self.kv_heads != self.heads,
            context_length=self.context_length,
        )
        return self.linear_o(attended.transpose(-3, -2).flatten(-2))

    def extra_repr(self) -> str:
        text = f"heads={self.heads}, is_causal={self.is_causal}"
        if self.kv_heads != self.heads:
            text += f", kv_heads={self.kv_heads}"
        return text


class MultiheadAttention(
    Normal, nn.MultiheadAttention, op=U.scaled_dot_product_attention
):
    """`torch.nn.MultiheadAttention`, unit-scaled, with the same arguments, masks and results.

    Weights are standard normal, biases zero, and the logits are ``mult * query @ key.T / width``,
    where torch divides by sqrt(width). ``forward`` raises ValueError for masks of another shape,
    and for ``is_causal`` without ``attn_mask``.

    Args:
        mult: the inverse of the softmax's temperature.
        context_length: as in `MHSA`, for the length S of the keys.

    Raises:
        NotImplementedError: add_bias_kv or add_zero_attn is used.
    """

    _ours = (MULT, CONTEXT_LENGTH)
    mult: float
    context_length: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias_k is not None or self.add_zero_attn:
            raise NotImplementedError(
                "add_bias_kv and add_zero_attn have no unit-scaled form"
            )
        old = self.out_proj
        like = (old.bias is not None, old.weight.device, old.weight.dtype)
        self.out_proj: Any = Linear(self.embed_dim, self.embed_dim, *like)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises weights with a standard normal and biases with zero."""
        super().reset_parameters()
        self.out_proj.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output and, if ``need_weights``, the probabilities, as torch does."""
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal is a hint about attn_mask: give the mask as well"
            )
        weights: Any = (self.in_proj_weight,)
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        operands = (query, key, value, weights, self.in_proj_bias)
        q, k, v = self._heads(*projections(*operands, U.linear))
        mask = self._mask(q, k, attn_mask, key_padding_mask)
        # with padding, fewer keys than a causal mask shows: the rule counts them
        causal = is_causal and key_padding_mask is None
        settings = (self.dropout * self.training, causal, self.mult)
        length = self.context_length
        probabilities = None
        if need_weights:
            out, probabilities = attention_with_weights(
                q, k, v, mask, *settings, length
            )
            if average_attn_weights:
                probabilities = probabilities.mean(1)
            if query.dim() != 3:
                probabilities = probabilities.squeeze(0)
        else:
            if causal:
                mask = None  # allows torch's causal kernel
            out = U.scaled_dot_product_attention(
                q, k, v, mask, *settings, context_length=length
            )
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if query.dim() == 2:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, probabilities

    def _heads(self, *tensors: Tensor) -> list[Tensor]:
        if tensors[0].dim() == 2:
            tensors = tuple(t.unsqueeze(0) for t in tensors)
        elif not self.batch_first:
            tensors = tuple(t.transpose(0, 1) for t in tensors)
        return [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in tensors]

    def _mask(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        """Both masks as one, added to the logits, broadcastable to (batch, heads, L, S)."""
        if padding is not None and padding.dim() == 1:
            padding = padding.unsqueeze(0)
        batch, sizes = q.shape[0], (q.shape[2], k.shape[2])
        return merge_masks(attn_mask, padding, batch, self.num_heads, sizes, q.dtype)
