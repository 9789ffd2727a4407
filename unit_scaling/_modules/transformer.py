"""A pre-norm transformer out of unit-scaled layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from .. import functional as U
from ..core.functional import ResidualScalingFn, transformer_residual_scaling_rule
from .containers import DepthSequential
from .layers import Embedding, Linear, LinearReadout, RMSNorm

__all__ = ["MHSA", "MLP", "TransformerDecoder", "TransformerLayer", "TransformerStack"]


class MLP(nn.Module):
    """A gated MLP: ``linear_2(linear_1(x) * silu(linear_gate(x)))``, as in Llama.

    Input and output (..., hidden_size). The inner width is expansion_factor * hidden_size.
    """

    def __init__(self, hidden_size: int, expansion_factor: int = 4) -> None:
        super().__init__()
        width = hidden_size * expansion_factor
        self.linear_1 = Linear(hidden_size, width)
        self.linear_gate = Linear(hidden_size, width)
        self.linear_2 = Linear(width, hidden_size)
        # linear_2 scales the gradient of its input as its output, by 1/sqrt(width), though it
        # sums over hidden_size terms: what the first two layers receive is this much smaller.
        self.linear_1.weight_grad_mult = math.sqrt(expansion_factor)
        self.linear_gate.weight_grad_mult = math.sqrt(expansion_factor)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear_2(U.silu_glu(self.linear_1(input), self.linear_gate(input)))


class MHSA(nn.Module):
    """Multi-head self-attention.

    Input and output (..., length, hidden_size). heads: a divisor of hidden_size. dropout_p: on
    the attention weights, in training only. mult: the inverse of the softmax's temperature.
    Raises ValueError where heads does not divide hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        is_causal: bool,
        dropout_p: float = 0.0,
        mult: float = 1.0,
    ) -> None:
        super().__init__()
        if heads < 1 or hidden_size % heads:
            raise ValueError(f"heads must divide hidden_size {hidden_size}: got {heads}")
        self.heads = heads
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.mult = mult
        self.linear_qkv = Linear(hidden_size, 3 * hidden_size)
        self.linear_o = Linear(hidden_size, hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        # (..., length, 3 * heads * width) -> 3 of (..., heads, length, width)
        qkv = self.linear_qkv(input).unflatten(-1, (3, self.heads, -1))
        query, key, value = (t.transpose(-3, -2) for t in qkv.unbind(-3))
        attended = U.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=self.is_causal,
            mult=self.mult,
        )
        return self.linear_o(attended.transpose(-3, -2).flatten(-2))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, is_causal={self.is_causal}"


class TransformerLayer(nn.Module):
    """Attention and MLP, each a residual branch that starts with an RMSNorm.

    Input and output (..., length, hidden_size). mhsa_tau, mlp_tau: the weights of the branches,
    see `unit_scaling.functional.residual_split`. dropout_p: at the end of each branch and in the
    attention, in training only.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        mhsa_tau: float,
        mlp_tau: float,
        is_causal: bool,
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.mhsa_tau = mhsa_tau
        self.mlp_tau = mlp_tau
        self.mhsa_norm = RMSNorm(hidden_size)
        self.mhsa = MHSA(hidden_size, heads, is_causal, dropout_p)
        self.mlp_norm = RMSNorm(hidden_size)
        self.mlp = MLP(hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        input = self._residual(input, self.mhsa_norm, self.mhsa, self.mhsa_tau)
        return self._residual(input, self.mlp_norm, self.mlp, self.mlp_tau)

    def _residual(self, input: Tensor, norm: nn.Module, branch: nn.Module, tau: float) -> Tensor:
        inner, skip = U.residual_split(input, tau)
        inner = U.dropout(branch(norm(inner)), self.dropout_p, self.training)
        return U.residual_add(inner, skip, tau)


class TransformerStack(DepthSequential):
    """``layers`` transformer layers whose residual weights follow ``residual_scaling``.

    residual_scaling: (index, branches) -> tau, by default u-muP's rule. kwargs: the other
    arguments of `TransformerLayer`.
    """

    def __init__(
        self,
        layers: int,
        residual_scaling: ResidualScalingFn = transformer_residual_scaling_rule(),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        branches = 2 * layers
        super().__init__(
            *(
                TransformerLayer(
                    **kwargs,
                    mhsa_tau=residual_scaling(2 * i, branches),
                    mlp_tau=residual_scaling(2 * i + 1, branches),
                )
                for i in range(layers)
            )
        )


class TransformerDecoder(nn.Sequential):
    """A language model: embedding, causal transformer layers, norm, readout.

    Input (..., length), token numbers below vocab_size. Output (..., length, vocab_size), logits.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        layers: int,
        heads: int,
        dropout_p: float = 0.0,
        residual_scaling: ResidualScalingFn = transformer_residual_scaling_rule(),  # noqa: B008
    ) -> None:
        stack = TransformerStack(
            layers,
            residual_scaling,
            hidden_size=hidden_size,
            heads=heads,
            is_causal=True,
            dropout_p=dropout_p,
        )
        parts: dict[str, nn.Module] = {
            "embedding": Embedding(vocab_size, hidden_size),
            "layers": stack,
            "final_norm": RMSNorm(hidden_size),
            "projection": LinearReadout(hidden_size, vocab_size),
        }
        super().__init__(OrderedDict(parts))

    def loss(self, input_ids: Tensor) -> Tensor:
        """The mean cross-entropy of predicting each token of input_ids from those before it.

        input_ids: (..., length), length 2 or more. Computed in float32 at least.
        """
        logits: Tensor = self(input_ids)[..., :-1, :]
        return U.cross_entropy(logits.float().flatten(0, -2), input_ids[..., 1:].flatten())
