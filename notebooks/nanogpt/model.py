"""A GPT in plain PyTorch, in nanoGPT's architecture: nothing here knows of FP8 or unit scaling.

Pre-norm transformer, learned positions, GELU, causal attention, the embedding shared with the
output projection (https://github.com/karpathy/nanoGPT). The demo shows that
``simulate_fp8`` and ``unit_scale`` take such a model as it stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # GPT-2's initialisation
MLP_RATIO = 4  # width of the hidden layer of an MLP, in units of the model's width


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. Raises ValueError for a shape that no GPT can have."""

    vocab: int
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab", "context", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width {self.width} and {self.heads} heads"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


class Attention(nn.Module):
    """Causal self-attention: (batch, time, width) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).reshape(batch, time, width)))


class MLP(nn.Module):
    """Two linear layers with GELU between: (batch, time, width) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, MLP_RATIO * config.width, bias=False)
        self.down = nn.Linear(MLP_RATIO * config.width, config.width, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention, then MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens (batch, time) int64 to logits (batch, time, vocab) and, given targets, the loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        """N(0, 0.02), smaller by sqrt(2 layers) where a branch joins the residual (GPT-2)."""
        joins = {
            id(layer)
            for block in self.blocks
            for layer in (block.attention.out, block.mlp.down)
        }
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                depth = 2 * self.config.layers if id(module) in joins else 1
                nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(depth))

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits for each position, and the mean cross-entropy to `targets` (or None).

        Raises ValueError if there are more positions than the model's context.
        """
        time = idx.shape[1]
        if time > self.config.context:
            raise ValueError(
                f"{time} tokens given, the context is {self.config.context}"
            )
        x = self.tokens(idx) + self.positions(torch.arange(time, device=idx.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`idx` (batch, time >= 1) followed by `count` sampled tokens.

        Each token sees at most the last `context` ones. `temperature` divides the logits. Dropout
        follows the module's mode: call eval() first.
        """
        for _ in range(count):
            logits, _ = self(idx[:, -self.config.context :])
            weights = torch.softmax(logits[:, -1].float() / temperature, dim=-1)
            token = torch.multinomial(weights, 1, generator=generator)
            idx = torch.cat([idx, token], dim=1)
        return idx
