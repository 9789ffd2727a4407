"""A decoder with what nanochat's (github.com/karpathy/nanochat) has beside GPT-2's.

Rotary positions, grouped queries and keys of RMS 1 that are then sharpened by a constant, value
embeddings behind a gate, weights per layer of the stream and of its input, squared ReLUs, zero
initializations, and a bound on logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.architectures import VOCABULARY

WIDTH, HEADS, KEYS, LAYERS = 64, 4, 2, 4
HEAD = WIDTH // HEADS
SHARPENING = 1.2
"""The factor of queries and keys after their norm."""
GATED = 12
"""The channels that a gate reads."""
BOUND = 15.0
"""The bound of logits, by tanh."""


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions of (batch, length, heads, HEAD)."""
    a, b = x.chunk(2, -1)
    return torch.cat(
        [a * angles.cos() + b * angles.sin(), b * angles.cos() - a * angles.sin()], -1
    )


class _Attention(nn.Module):
    def __init__(self, has_values: bool) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys = nn.Linear(WIDTH, KEYS * HEAD, bias=False)
        self.values = nn.Linear(WIDTH, KEYS * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(GATED, KEYS, bias=False) if has_values else None

    def forward(self, x: Tensor, extra: Tensor | None, angles: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD))
            for layer in (self.queries, self.keys, self.values)
        )
        if self.gate is not None and extra is not None:
            gate = 3 * torch.sigmoid(self.gate(x[..., :GATED]))
            v = v + gate[..., None] * extra.unflatten(-1, (-1, HEAD))
        q, k = (SHARPENING * _norm(_turned(t, angles)) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, has_values: bool) -> None:
        super().__init__()
        self.attention = _Attention(has_values)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, extra: Tensor | None, angles: Tensor) -> Tensor:
        x = x + self.attention(_norm(x), extra, angles)
        return x + self.down(F.relu(self.up(_norm(x))).square())


class NanoChat(nn.Module):
    """Tokens and the tokens after them, (batch, length) int64 each, to the mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block(i % 2 == 1) for i in range(LAYERS))
        self.extra = nn.ModuleDict(
            {str(i): nn.Embedding(VOCABULARY, KEYS * HEAD) for i in range(1, LAYERS, 2)}
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.stream = nn.Parameter(torch.ones(LAYERS))
        self.start = nn.Parameter(torch.full((LAYERS,), 0.1))
        self._initialize()

    def _initialize(self) -> None:
        """Sets nanochat's initial values: uniform of RMS 1 / sqrt(width), zeros where a branch
        ends."""
        bound = (3 / WIDTH) ** 0.5
        nn.init.normal_(self.tokens.weight, std=0.8)
        nn.init.normal_(self.head.weight, std=0.001)
        for block in self.blocks:
            attention = block.attention
            for layer in (attention.queries, attention.keys, attention.values):
                nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.uniform_(block.up.weight, -0.4 * bound, 0.4 * bound)
            nn.init.zeros_(attention.out.weight)
            nn.init.zeros_(block.down.weight)
            if attention.gate is not None:
                nn.init.uniform_(attention.gate.weight, 0, 0.02)
        for table in self.extra.values():
            nn.init.uniform_(table.weight, -bound, bound)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        rates = 1e4 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.outer(torch.arange(idx.shape[1]).float(), rates)[None, :, None]
        x = first = _norm(self.tokens(idx))
        for i, block in enumerate(self.blocks):
            x = self.stream[i] * x + self.start[i] * first
            extra = self.extra[str(i)](idx) if str(i) in self.extra else None
            x = block(x, extra, angles)
        logits = BOUND * torch.tanh(self.head(_norm(x)).float() / BOUND)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
