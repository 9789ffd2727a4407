"""A pre-norm transformer of unit-scaled layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from .. import functional as U
from ..core.functional import ResidualScalingFn, transformer_residual_scaling_rule
from .attention import MHSA
from .containers import DepthSequential
from .embedding import Embedding
from .linear import Linear, LinearReadout
from .norms import RMSNorm

__all__ = ["MLP", "TransformerDecoder", "TransformerLayer", "TransformerStack"]


class MLP(nn.Module):
    """A gated MLP: ``linear_2(linear_1(x) * silu(linear_gate(x)))``, as in Llama.

    Input and output are (..., hidden_size). expansion_factor: inner width / ``hidden_size``.
    """

    def __init__(self, hidden_size: int, expansion_factor: int = 4) -> None:
        super().__init__()
        width = hidden_size * expansion_factor
        self.linear_1 = Linear(hidden_size, width)
        self.linear_gate = Linear(hidden_size, width)
        self.linear_2 = Linear(width, hidden_size)
        # linear_2 scales the gradient of its input like its output, by 1/sqrt(width), although it
        # sums over hidden_size terms: the first two layers' gradients are smaller by the ratio.
        self.linear_1.weight_grad_mult = math.sqrt(expansion_factor)
        self.linear_gate.weight_grad_mult = math.sqrt(expansion_factor)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear_2(U.silu_glu(self.linear_1(input), self.linear_gate(input)))


class TransformerLayer(nn.Module):
    """Attention and MLP, each a residual branch that starts with an RMSNorm.

    Input and output are (..., length, hidden_size). Other arguments, also those of ``attention``,
    are as in `MHSA`.

    Args:
        mhsa_tau: the weight of the attention branch; see `unit_scaling.functional.residual_split`.
        mlp_tau: the weight of the MLP branch.
        dropout_p: the dropout probability at the end of each branch and in attention, in training
            only.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        mhsa_tau: float,
        mlp_tau: float,
        is_causal: bool,
        dropout_p: float = 0.0,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.dropout_p, self.mhsa_tau, self.mlp_tau = dropout_p, mhsa_tau, mlp_tau
        self.mhsa_norm = RMSNorm(hidden_size)
        self.mhsa = MHSA(hidden_size, heads, is_causal, dropout_p, **attention)
        self.mlp_norm = RMSNorm(hidden_size)
        self.mlp = MLP(hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        for norm, layer, tau in (
            (self.mhsa_norm, self.mhsa, self.mhsa_tau),
            (self.mlp_norm, self.mlp, self.mlp_tau),
        ):
            inner, skip = U.residual_split(input, tau)
            inner = U.dropout(layer(norm(inner)), self.dropout_p, self.training)
            input = U.residual_add(inner, skip, tau)
        return input


class TransformerStack(DepthSequential):
    """A stack of transformer layers, of which ``kwargs`` are the arguments.

    residual_scaling: the rule (index, branches) -> tau of residual weights; by default u-muP's.
    With `unit_scaling.completep_residual_scaling_rule` the parameters have no depth.
    """

    def __init__(
        self,
        layers: int,
        residual_scaling: ResidualScalingFn = transformer_residual_scaling_rule(),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        self.keeps_rates = getattr(residual_scaling, "keeps_rates", False)
        taus = [residual_scaling(index, 2 * layers) for index in range(2 * layers)]
        parts = []
        for mhsa_tau, mlp_tau in zip(taus[::2], taus[1::2], strict=True):
            layer = TransformerLayer(**kwargs, mhsa_tau=mhsa_tau, mlp_tau=mlp_tau)
            parts.append(layer)
        super().__init__(*parts)


class TransformerDecoder(nn.Sequential):
    """A language model: embedding, causal transformer layers, norm, readout.

    Input is (..., length), token indices below vocab_size. Output is (..., length, vocab_size),
    logits.

    With ``context_length``, the logits of a token do not depend on how many tokens follow.

    Args:
        residual_scaling: see `TransformerStack`.
        attention: arguments of `MHSA`, such as ``context_length``, the maximum sequence length.

    >>> import torch, unit_scaling as uu
    >>> model = uu.TransformerDecoder(16, 11, layers=2, heads=2, context_length=64)
    >>> tokens = torch.arange(8)[None]
    >>> torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        layers: int,
        heads: int,
        dropout_p: float = 0.0,
        residual_scaling: ResidualScalingFn = transformer_residual_scaling_rule(),  # noqa: B008
        **attention: Any,
    ) -> None:
        stack = TransformerStack(
            layers,
            residual_scaling,
            hidden_size=hidden_size,
            heads=heads,
            is_causal=True,
            dropout_p=dropout_p,
            **attention,
        )
        parts: dict[str, nn.Module] = {
            "embedding": Embedding(vocab_size, hidden_size),
            "layers": stack,
            "final_norm": RMSNorm(hidden_size),
            "projection": LinearReadout(hidden_size, vocab_size),
        }
        super().__init__(OrderedDict(parts))

    def loss(self, input_ids: Tensor) -> Tensor:
        """Returns the mean cross entropy of predicting each token from the previous ones, in at
        least float32. input_ids: (..., length), length 2 or more."""
        logits: Tensor = self(input_ids)[..., :-1, :]
        return U.cross_entropy(
            logits.float().flatten(0, -2), input_ids[..., 1:].flatten()
        )
