"""The problem of ``fp8 preflight --demo``: a small GPT on text that every Python installation
has."""

from __future__ import annotations

import inspect
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .training import Setup

SOURCES = ("argparse", "ast", "collections", "datetime", "functools", "inspect", "typing")
"""Modules of the standard library whose source is the text."""

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 64, 16


class _Block(nn.Module):
    """Causal self-attention and an MLP, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder that returns its loss. context: the longest sequence."""

    def __init__(
        self,
        width: int = WIDTH,
        heads: int = HEADS,
        layers: int = LAYERS,
        context: int = CONTEXT,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean cross entropy of each token after the first. ids: (batch, length + 1), int64."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = self.tokens(inputs) + self.positions[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_batches(text: bytes, batch: int, context: int, count: int, seed: int) -> list[Tensor]:
    """Batches of random windows of a text: ``count`` tensors of shape (batch, context + 1), int64.

    Raises ValueError for a text of fewer than ``context + 2`` bytes.
    """
    if len(text) < context + 2:
        raise ValueError(f"the text has {len(text)} bytes; a window needs {context + 2}")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - context, (count, batch, 1), generator=generator)
    return list(data[starts + torch.arange(context + 1)])


def setup(seed: int, count: int = 1024) -> Setup:
    """A GPT of two layers, 64 wide, on the source of Python's standard library."""
    text = "".join(inspect.getsource(import_module(name)) for name in SOURCES).encode()
    model = GPT()
    return Setup(
        model,
        text_batches(text, BATCH, CONTEXT, count, seed),
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98)),
    )
